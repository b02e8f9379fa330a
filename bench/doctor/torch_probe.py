"""What torch says, once it is loaded: `python -m bench.doctor.torch_probe` prints JSON.

In a process of its own: a library that crashes on being loaded costs one answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answers() -> dict[str, Any]:
    """Facts about torch; what cannot be found out is None."""
    import torch
    import torch.distributed as dist

    nccl = getattr(dist, "ProcessGroupNCCL", None)
    versions = {}
    for name, method in (("compiled", "build"), ("loaded", "runtime")):
        ask = getattr(nccl, f"get_{method}_nccl_version", None)
        versions[name] = None if ask is None else ".".join(str(part) for part in ask())
    return {
        "torch": torch.__version__,
        "cuda_compiled": torch.version.cuda,
        "cuda_usable": torch.cuda.is_available(),
        "nccl": versions,
    }


if __name__ == "__main__":
    json.dump(answers(), sys.stdout)
