"""Hashes of runs as they were until November 2026, by which baselines of that time know them.

Frozen: the rule hashed every setting of every engine, but for those of `_LATER` at their default.
What came later is named here, since an
engine's settings are hashed whole.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from bench.spec.engine_table import MfsdpSettings
from bench.spec.model import LinearLayers
from bench.spec.run import ResolvedRun

_LATER: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "shape": {"hybrid": (None,)},
    "launch": {
        "ranks_per_device": (1,),
        "nodes": (1,),
        "copy_engine": (False,),
        "nvls": ("default",),
        "collnet": ("default",),
    },
    "measure": {"nccl": ("none",), "counts": (False,)},
    "engine": {
        "decoupled_grad": (False,),
        "separate_gather_group": (False,),
        "pool_slots": (2,),
        "fine_grained_gather": (None, False),
        "recipe": ("none",),
        "gather_precision": ("recipe",),
        "nan_check": (False,),
        "symmetric_registration": (True,),
        "manual_registration": (False,),
        "cuda_graph": (False,),
        "tensor_parallel": (1,),
        "expert_parallel": (1,),
        "per_token_loss": (False,),
    },
    "train": {
        "state_dtype": ("fp32",),
        "master_weights": (False,),
        "store_remainders": (False,),
        "checkpoint_every": (None,),
    },
}


def former_config_hash(run: ResolvedRun) -> str:
    """12 hex digits, as `ResolvedRun.config_hash` gave them."""
    document: dict[str, Any] = run.model_dump(mode="json")
    del document["factory"]
    if document["linear"] == LinearLayers().model_dump():
        del document["linear"]
    document["engine"] = MfsdpSettings().model_dump(mode="json") | document["engine"]
    for limit in ("timeout_seconds", "hang_seconds"):
        del document["launch"][limit]
    if document["shape"] is not None:
        document["shape"].pop("rope_scaling")
    for section, settings in _LATER.items():
        for name, defaults in settings.items():
            if document[section] is not None and document[section].get(name, ...) in defaults:
                del document[section][name]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
