"""Logs of Megatron-LM: iteration lines, memory lines and the block of arguments.

Lines as `training_log`, `report_memory` and `_print_args` of Megatron-LM print them; whatever
stands before them, as the prefix of `srun -l`, is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bench.importers.parsed import Parsed, number, number_after
from bench.workload import ImportedStep

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_MEMORY = re.compile(
    r"\(after (\d+) iterations\) memory \(MB\).*?max allocated: ([\d.]+).*?max reserved: ([\d.]+)"
)
_ARGUMENT = re.compile(r"^\W*(?:\d+:)?\s*(\w+) \.{3,} (.*)$")
_PARAMETERS = re.compile(r"number of parameters on .*rank \(0, 0\): (\d+)")
# `report_memory` divides by 1024 twice and says MB.
_MEBIBYTE = 2**20

# Field of `Workload`, argument of Megatron-LM.
_COUNTS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "vocab": "padded_vocab_size",
    "ranks": "world_size",
    "data_parallel": "data_parallel_size",
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "steps": "train_iters",
    "global_batch": "global_batch_size",
    "micro_batch": "micro_batch_size",
    "seq_len": "seq_length",
}
_DTYPES = {
    "main_params_dtype": "main_params_dtype",
    "main_grads_dtype": "main_grads_dtype",
    "grad_comm_dtype": "grad_comm_dtype",
}
_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
# Arguments whose names hold one of these change what FSDP does.
_TELLING = ("fsdp", "nccl_ub", "recompute", "fp8", "fp4", "overlap", "sharding", "outer", "expert")


def read(lines: Iterable[str]) -> Parsed:
    """What a log of Megatron-LM tells; no step where it is not one."""
    parsed = Parsed()
    arguments: dict[str, str] = {}
    peaks: dict[int, tuple[int, int]] = {}
    skipped = 0
    for line in lines:
        if found := _ITERATION.search(line):
            parsed.add(_step(int(found[1]), line))
            skipped += int(number_after(line, "number of skipped iterations") or 0)
            batch = number_after(line, "global batch size")
            if batch is not None:
                parsed.workload["global_batch"] = int(batch)
        elif found := _MEMORY.search(line):
            step, (allocated, reserved) = int(found[1]), map(_bytes, found.groups()[1:])
            before = peaks.get(step, (0, 0))
            peaks[step] = (max(before[0], allocated), max(before[1], reserved))
        elif found := _PARAMETERS.search(line):
            parsed.workload["parameters"] = int(found[1])
        elif found := _ARGUMENT.match(line):
            arguments[found[1]] = found[2].strip()
    for step, (allocated, reserved) in peaks.items():
        kept = parsed.steps.get(step, ImportedStep(step))
        parsed.steps[step] = replace(
            kept, device_peak_bytes=allocated, device_reserved_peak_bytes=reserved
        )
    _arguments(parsed, arguments)
    if skipped:
        parsed.remarks.append(f"{skipped} iterations were skipped")
    return parsed


def _bytes(text: str) -> int:
    return round((number(text) or 0) * _MEBIBYTE)


def _step(iteration: int, line: str) -> ImportedStep:
    loss = number_after(line, "lm loss")
    return ImportedStep(
        iteration,
        milliseconds=number_after(line, "elapsed time per iteration (ms)"),
        loss=number_after(line, "| loss") if loss is None else loss,
        grad_norm=number_after(line, "grad norm"),
        learning_rate=number_after(line, "| learning rate"),
        teraflops_per_device=number_after(line, "throughput per GPU (TFLOP/s/GPU)"),
    )


def _arguments(parsed: Parsed, arguments: dict[str, str]) -> None:
    workload = parsed.workload
    workload["framework"] = "megatron-lm"
    if not arguments:
        return
    for name, argument in _COUNTS.items():
        text = arguments.get(argument, "")
        if text.isdigit():
            workload[name] = int(text)
    fsdp = arguments.get("use_megatron_fsdp", arguments.get("use_custom_fsdp")) == "True"
    for name, argument in _DTYPES.items():
        text = arguments.get(f"megatron_fsdp_{argument}" if fsdp else argument, "None")
        if text != "None":
            workload[name] = _SHORT.get(text, text)
    on = {name for name, text in arguments.items() if text == "True"}
    workload["compute_dtype"] = "bf16" if "bf16" in on else "fp16" if "fp16" in on else "fp32"
    workload["engine"] = _engine(fsdp, on)
    if fsdp:
        workload["strategy"] = arguments.get("data_parallel_sharding_strategy")
    if "optimizer" in arguments:
        workload["optimizer"] = arguments["optimizer"]
    if workload.get("tensor_parallel") != 1 or workload.get("pipeline_parallel") != 1:
        # The line counts one of several parts of the model.
        workload.pop("parameters", None)
    workload["settings"] = {
        name: _value(text)
        for name, text in arguments.items()
        if any(part in name for part in _TELLING)
    }


def _engine(fsdp: bool, on: set[str]) -> str:
    if fsdp:
        return "megatron-fsdp"
    if "use_torch_fsdp2" in on:
        return "fsdp2"
    return "distributed-optimizer" if "use_distributed_optimizer" in on else "ddp"


def _value(text: str) -> Any:
    constants = {"True": True, "False": False, "None": None}
    return constants.get(text, text)
