"""Logs of Megatron-LM and Megatron-Bridge: iteration lines, memory lines, the block of arguments.

Lines as `training_log`, `report_memory` and `_print_args` print them, in all versions; whatever
stands before them, such as the prefix of `srun -l`, is ignored. Bridge prints the same iteration
line, memory in GB of 1e9 bytes under names of its own, and a line of step time above it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bench.importers.parsed import MEMORY, NUMBER, Said, Value, number, renamed, value

# That of NeMo stands behind a comma.
_ITERATION = re.compile(
    # Two processes can print on one line; the fields of the second are not those of the first.
    r"(?<!, )\biteration\s+(\d+)/\s*(\d+|infinity) \|(.*?)(?=$|\[[\d .:-]+\]\s*iteration\s)"
)
_TIMESTAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s*$")
_MEMORY = re.compile(
    r"(?:\[Rank (\d+)\] )?\(?after (\d+) iterations\)? memory \((MB|GB)\) \|(.*)", re.IGNORECASE
)
_STEP_TIME = re.compile(
    rf"Step Time : ({NUMBER})s GPU utilization: ({NUMBER})(?:MODEL_)?TFLOP/s/GPU", re.IGNORECASE
)
_ARGUMENT = re.compile(r"^\W*(?:\d+:)?\s*(\w+) \.{3,} (.*)$")
_PARAMETERS = re.compile(r"number of parameters on .*rank \(0, 0\): (\d+)")
# Older versions print `learning rate 1.0E-04` without a colon.
_FIELD = re.compile(rf"^(.+?)(?::\s*|\s+)({NUMBER}\s?%?)$", re.IGNORECASE)

_NAMES: Mapping[str, tuple[str, float]] = {
    "elapsed time per iteration (ms)": ("milliseconds", 1.0),
    "throughput per GPU (TFLOP/s/GPU)": ("teraflops_per_device", 1.0),
    "learning rate": ("learning_rate", 1.0),
    "lm loss": ("loss", 1.0),
    "loss": ("loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "toks/s/gpu": ("tokens_per_second_per_device", 1.0),
}
# `report_memory` of Megatron-LM divides by 1024 twice and says MB; that of Bridge by 1e9.
_MEBIBYTE = 2.0**20
_MOST = 2**40
_MEMORY_NAMES: Mapping[str, tuple[str, float]] = {
    "allocated": ("device_allocated_bytes", _MEBIBYTE),
    "max allocated": ("device_peak_bytes", _MEBIBYTE),
    "reserved": ("device_reserved_bytes", _MEBIBYTE),
    "max reserved": ("device_reserved_peak_bytes", _MEBIBYTE),
    "cached": ("device_reserved_bytes", _MEBIBYTE),
    "max cached": ("device_reserved_peak_bytes", _MEBIBYTE),
    "mem-allocated-gigabytes": ("device_allocated_bytes", 1e9),
    "mem-max-allocated-gigabytes": ("device_peak_bytes", 1e9),
    "mem-reserved-gigabytes": ("device_reserved_bytes", 1e9),
    "mem-max-reserved-gigabytes": ("device_reserved_peak_bytes", 1e9),
}

# Field of `Workload`, argument of Megatron-LM.
_COUNTS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "padded_vocab_size": "vocab",
    "world_size": "ranks",
    "data_parallel_size": "data_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "train_iters": "steps",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "seq_length": "seq_len",
}
_DTYPES = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
# Arguments whose names hold one of these change what FSDP does.
_TELLING = ("fsdp", "nccl_ub", "recompute", "fp8", "fp4", "overlap", "sharding", "outer", "expert")
_ARGUMENTS = "_arguments"


def line(text: str) -> Said | None:
    """What a line of Megatron-LM or Bridge says; None for any other."""
    if found := _ITERATION.search(text):
        return _iteration(text, found)
    if found := _MEMORY.search(text):
        return _memory(found)
    if found := _STEP_TIME.search(text):
        seconds, rate = number(found[1]), number(found[2])
        said: dict[str, Value] = {}
        if seconds is not None and rate is not None:
            said = {"milliseconds": seconds * 1e3, "teraflops_per_device": rate}
        return Said(None, said, {"framework": "megatron-bridge"})
    if found := _PARAMETERS.search(text):
        return Said(facts={"parameters": int(found[1])})
    if " ..." in text and (found := _ARGUMENT.match(text)):
        return Said(facts=_argument(found[1], found[2].strip()))
    return None


def _iteration(text: str, found: re.Match[str]) -> Said:
    said: dict[str, Value] = {}
    if stamp := _TIMESTAMP.search(text[: found.start()]):
        said["timestamp"] = stamp[1]
    *fields, rest = found[3].split("|")
    for part in fields:
        if one := _FIELD.match(part.strip()):
            said[one[1].strip()] = value(one[2])
    if (one := _FIELD.match(rest.strip())) and one[1].strip() in _NAMES:
        said[one[1].strip()] = f"{one[2]} without a | behind it, perhaps cut off"
    facts: dict[str, Any] = {"framework": "megatron-lm"}
    if found[2].isdecimal() and int(found[2]) < _MOST:
        facts["steps"] = int(found[2])
    batch = said.pop("global batch size", None)
    if isinstance(batch, float) and 0 < batch < _MOST:
        facts["global_batch"] = int(batch)
    if "max attention logit" in said:
        facts["framework"] = "megatron-bridge"
    return Said(int(found[1]), renamed(said, _NAMES), facts)


def _memory(found: re.Match[str]) -> Said:
    said: dict[str, Value] = {}
    for part in found[4].split("|"):
        name, _, text = part.rpartition(":")
        if name:
            said[name.strip()] = value(text)
    facts = {"framework": "megatron-bridge"} if found[3].upper() == "GB" else {}
    return Said(int(found[2]), renamed(said, _MEMORY_NAMES), facts, kind=MEMORY)


def _argument(name: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{_ARGUMENTS}.{name}": text}
    if name in _COUNTS and text.isdigit():
        found[_COUNTS[name]] = int(text)
    if name == "optimizer":
        found["optimizer"] = text
    return found


def finish(workload: dict[str, Any]) -> dict[str, Any]:
    """The workload with what its arguments mean together."""
    arguments = {
        name.removeprefix(f"{_ARGUMENTS}."): workload[name]
        for name in list(workload)
        if name.startswith(f"{_ARGUMENTS}.")
    }
    plain = {name: one for name, one in workload.items() if not name.startswith(_ARGUMENTS)}
    if not arguments.keys() & _COUNTS.keys():
        return plain
    fsdp = arguments.get("use_megatron_fsdp", arguments.get("use_custom_fsdp")) == "True"
    for name in _DTYPES:
        text = arguments.get(f"megatron_fsdp_{name}" if fsdp else name, "None")
        if text != "None":
            plain[name] = _SHORT.get(text, text)
    on = {name for name, text in arguments.items() if text == "True"}
    plain["compute_dtype"] = "bf16" if "bf16" in on else "fp16" if "fp16" in on else "fp32"
    plain["engine"] = _engine(fsdp, on)
    plain.setdefault("framework", "megatron-lm")
    if fsdp:
        plain["strategy"] = arguments.get("data_parallel_sharding_strategy")
    if plain.get("tensor_parallel") != 1 or plain.get("pipeline_parallel") != 1:
        # The line counts one of several parts of the model.
        plain.pop("parameters", None)
    constants = {"True": True, "False": False, "None": None}
    plain["settings"] = {
        name: constants.get(text, text)
        for name, text in arguments.items()
        if any(part in name for part in _TELLING)
    }
    return plain


def _engine(fsdp: bool, on: set[str]) -> str:
    if fsdp:
        return "megatron-fsdp"
    if "use_torch_fsdp2" in on:
        return "fsdp2"
    return "distributed-optimizer" if "use_distributed_optimizer" in on else "ddp"
