"""What the arguments of Megatron-LM mean together."""

from __future__ import annotations

from typing import Any

_DTYPES = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
# Arguments whose names hold one of these change what FSDP does.
_TELLING = ("fsdp", "nccl_ub", "recompute", "fp8", "fp4", "overlap", "sharding", "outer", "expert")
_CONSTANTS = {"True": True, "False": False, "None": None}


def with_arguments(workload: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """The workload with dtypes, engine, strategy and settings, where arguments were printed."""
    if "world_size" not in given and "num_layers" not in given:
        return workload
    plain = {"framework": "megatron-lm"} | workload
    fsdp = given.get("use_megatron_fsdp", given.get("use_custom_fsdp")) == "True"
    for name in _DTYPES:
        text = given.get(f"megatron_fsdp_{name}" if fsdp else name, "None")
        if text != "None":
            plain[name] = _SHORT.get(text, text)
    on = {name for name, text in given.items() if text == "True"}
    plain["compute_dtype"] = "bf16" if "bf16" in on else "fp16" if "fp16" in on else "fp32"
    other = "distributed-optimizer" if "use_distributed_optimizer" in on else "ddp"
    other = "fsdp2" if "use_torch_fsdp2" in on else other
    plain["engine"] = "megatron-fsdp" if fsdp else other
    if fsdp:
        plain["strategy"] = given.get("data_parallel_sharding_strategy")
    if plain.get("tensor_parallel") != 1 or plain.get("pipeline_parallel") != 1:
        # The line counts one of several parts of the model.
        plain.pop("parameters", None)
    telling = {name: text for name, text in given.items() if any(one in name for one in _TELLING)}
    plain["settings"] = {name: _CONSTANTS.get(text, text) for name, text in telling.items()}
    return plain
