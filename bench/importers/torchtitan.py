"""Logs of torchtitan: its lines of step, loss, memory and throughput, with colours or without.

`memory` there is the peak that the allocator reserved, in GiB; `tps` is tokens per second and
device (`MetricsProcessor.log`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.importers.parsed import Parsed, number_after
from bench.workload import ImportedStep

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Validation prints `validate step:`, which is no step of training.
_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+loss:")
_GIBIBYTE = 2**30


def read(lines: Iterable[str]) -> Parsed:
    """What a log of torchtitan tells; no step where it is not one."""
    parsed = Parsed({"framework": "torchtitan"})
    for coloured in lines:
        line = _COLOUR.sub("", coloured)
        if found := _STEP.search(line):
            reserved = number_after(line, "memory")
            parsed.add(
                ImportedStep(
                    int(found[1]),
                    loss=number_after(line, " loss"),
                    grad_norm=number_after(line, "grad_norm"),
                    device_reserved_peak_bytes=None
                    if reserved is None
                    else round(reserved * _GIBIBYTE),
                    tokens_per_second_per_device=number_after(line, "tps"),
                    teraflops_per_device=number_after(line, "tflops"),
                )
            )
    return parsed
