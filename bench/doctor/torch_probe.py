"""What torch and its companions say about themselves, asked in a process of their own.

`python -m bench.doctor.torch_probe` prints JSON. A library that crashes on being loaded then costs
one answer, and the command itself stays light.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_COMPANIONS = ("transformer_engine.pytorch",)


def answers() -> dict[str, Any]:
    """Facts about the loaded libraries; what cannot be found out is None."""
    import torch

    return {
        "torch": torch.__version__,
        "cuda_compiled": torch.version.cuda,
        "cuda_usable": torch.cuda.is_available(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "pairs_without_peer_access": _pairs_apart(),
        "nccl": _nccl(),
        "symmetric_pools": _symmetric_pools(),
        "loads": {name: _loads(name) for name in _COMPANIONS},
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    facts = torch.cuda.get_device_properties(index)
    return {"name": facts.name, "capability": [facts.major, facts.minor]}


def _pairs_apart() -> list[list[int]]:
    """Pairs of devices of which one cannot read the other's memory."""
    import torch

    count = torch.cuda.device_count()
    pairs = [[i, j] for i in range(count) for j in range(count) if i != j]
    return [[i, j] for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]


def _nccl() -> dict[str, str | None]:
    """The version torch was compiled with, and that of the library that it has loaded."""
    import torch.distributed as dist

    group = getattr(dist, "ProcessGroupNCCL", None)
    found = {}
    for name, method in (("compiled", "build"), ("loaded", "runtime")):
        ask = getattr(group, f"get_{method}_nccl_version", None)
        found[name] = None if ask is None else ".".join(str(part) for part in ask())
    return found


def _symmetric_pools() -> bool:
    """Whether this torch can register a memory pool with NCCL as symmetric."""
    import torch.distributed as dist

    register = getattr(getattr(dist, "ProcessGroupNCCL", None), "register_mem_pool", None)
    return "symm" in (getattr(register, "__doc__", "") or "")


def _loads(name: str) -> str | None:
    """Why `name` cannot be loaded; "" if it can, None if it is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        return None if error.name == top else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    json.dump(answers(), sys.stdout)
