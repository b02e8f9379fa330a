"""Logs of torchtitan: its lines of step, loss, memory and throughput.

`memory` there is the peak that the allocator reserved since the last line, in GiB; `tps`, `wps`
before 2024-11, is tokens per second and device (`MetricsProcessor.log`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.importers.parsed import NUMBER, Said, Value, renamed, value

# Validation prints `validate step:`, which is no step of training.
_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+(loss:.*)")
_FIELD = re.compile(rf"(\w+):\s*({NUMBER})(?:GiB\(({NUMBER})%\))?(?=%|\s|$)", re.IGNORECASE)
_NAMES: Mapping[str, tuple[str, float]] = {
    "memory": ("device_reserved_peak_bytes", 2.0**30),
    "tps": ("tokens_per_second_per_device", 1.0),
    "wps": ("tokens_per_second_per_device", 1.0),
    "tflops": ("teraflops_per_device", 1.0),
}


def line(text: str) -> Said | None:
    """What a line of torchtitan says; None for any other."""
    found = _STEP.search(text)
    if found is None:
        return None
    said: dict[str, Value] = {}
    for name, one, share in _FIELD.findall(found[2]):
        said[name] = value(one)
        if share:
            said[f"{name} %"] = value(share)
    return Said(int(found[1]), renamed(said, _NAMES), {"framework": "torchtitan"})
