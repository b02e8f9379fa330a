"""Fully sharded data parallel training: ZeRO 0 to 3 behind the interface of `megatron_fsdp`.

Names load lazily, so that `mfsdp_core.plan` can be used without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

_HOMES = {
    "CapturedStep": "mfsdp_core.captured_step",
    "Float8Reference": "mfsdp_core.precision.float8_reference",
    "MegatronFSDP": "mfsdp_core.wrapper",
    "MixedPrecisionPolicy": "mfsdp_core.precision.policy",
    "annotated": "mfsdp_core.annotate",
    "clip_grad_norm_": "mfsdp_core.state.grad_norm",
    "errors": "mfsdp_core.errors",
    "export_state_dict": "mfsdp_core.state.plain_export",
    "fully_shard": "mfsdp_core.api",
    "fully_shard_model": "mfsdp_core.api",
    "fully_shard_optimizer": "mfsdp_core.api",
    "gather_full": "mfsdp_core.shard.dtensor",
    "load_checkpoint": "mfsdp_core.state.checkpoint",
    "load_safetensors": "mfsdp_core.state.plain_export",
    "save_checkpoint": "mfsdp_core.state.checkpoint",
    "save_safetensors": "mfsdp_core.state.plain_export",
    "uneven_dtensor": "mfsdp_core.uneven_dtensor",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name == "__version__":
        return importlib.metadata.version("mfsdp-bench")
    home = _HOMES.get(name)
    if home is None:
        removed = name in ("DistributedDataParallelConfig", "FSDPDistributedIndex")
        instead = ": pass its fields to fully_shard_model (docs/frameworks.md)"
        words = f"module {__name__!r} has no attribute {name!r}{instead if removed else ''}"
        raise AttributeError(words)
    module = importlib.import_module(home)
    return module if home == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
