"""Hashes of runs as they were until November 2026, by which baselines of that time know them.

Frozen: the rule hashed every setting of every engine, but for those of `_LATER` at their default.
What came later is named here, since an
engine's settings are hashed whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from bench.spec.engine_table import MfsdpSettings
from bench.spec.model import LinearLayers
from bench.spec.names import SHARDED
from bench.spec.run import ResolvedRun

_LATER: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "shape": {"hybrid": (None,), "qkv_bias": (False,)},
    "launch": {
        "ranks_per_device": (1,),
        "nodes": (1,),
        "copy_engine": (False,),
        "nvls": ("default",),
        "collnet": ("default",),
    },
    "measure": {"nccl": ("none",), "counts": (False,), "host_time": (False,)},
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
        "reshard_after_forward": (None,),
        "compile_backend": ("none",),
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
    if document["dtypes"]["reduce"] == former_sums(document):
        del document["dtypes"]["reduce"]
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


def former_sums(document: Mapping[str, Any]) -> str | None:
    """The dtype that ranks' gradients were added up in before it had a name.

    Direct exchange took FP32 at least, and `auto` chose it on a CPU where an axis scatters
    gradients; collectives took the dtype of the wire. None where two axes differed.
    """
    engine, wire = document["engine"], document["dtypes"]["grad_comm"]
    launch = document.get("launch")
    on_cpu = not isinstance(launch, dict) or launch.get("device", "cpu") == "cpu"
    default = "auto" if engine.get("name") == "mfsdp" else "native"
    transport = engine.get("transport", default)
    scatters = [bool(SHARDED.get(engine.get("strategy"), {"optimizer"}))]
    if engine.get("outer_size", 1) > 1:
        scatters.append(bool(SHARDED.get(engine.get("outer_strategy"))))
    exchanged = {
        transport in ("point_to_point", "same_host") or (transport == "auto" and on_cpu and one)
        for one in scatters
    }
    wide = wire if wire == "fp64" else "fp32"
    found: set[str] = {wide if one else wire for one in exchanged}
    return found.pop() if len(found) == 1 else None
