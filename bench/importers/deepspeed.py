"""Logs of DeepSpeed: the line of step and learning rate, that of its timer, that of its pipeline.

Rates there are samples of the global batch per second, memory is in GiB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.importers.parsed import NUMBER, Said, Value, renamed, value

_STEP = re.compile(rf"\bstep=(\d+), skipped=(\d+), lr=\[({NUMBER})?", re.IGNORECASE)
_TIMER = re.compile(
    r"(?:epoch=\d+/micro_step=\d+/global_step=(\d+)|\b\d+/(\d+)), "
    r"((?:RunningAvg)?SamplesPerSec=.*)"
)
_PIPELINE = re.compile(
    rf"\bsteps: (\d+) loss: ({NUMBER}) iter time \(s\): ({NUMBER})(.*)", re.IGNORECASE
)
_FIELD = re.compile(rf"(\w+)=({NUMBER})(?:GB)?", re.IGNORECASE)
_NAMES: Mapping[str, tuple[str, float]] = {
    "MemAllocated": ("device_allocated_bytes", 2.0**30),
    "MaxMemAllocated": ("device_peak_bytes", 2.0**30),
}
_FACTS = {"framework": "deepspeed"}


def line(text: str) -> Said | None:
    """What a line of DeepSpeed says; None for any other."""
    if found := _STEP.search(text):
        said: dict[str, Value] = {"skipped in total": float(found[2])}
        if found[3]:
            said["learning_rate"] = value(found[3])
        return Said(int(found[1]), said, _FACTS)
    if found := _TIMER.search(text):
        said = {name: value(one) for name, one in _FIELD.findall(found[3])}
        return Said(int(found[1] or found[2]), renamed(said, _NAMES), _FACTS, kind="timer")
    if found := _PIPELINE.search(text):
        seconds, rate = value(found[3]), re.search(rf"samples/sec: ({NUMBER})", found[4])
        said = {"loss": value(found[2])}
        if isinstance(seconds, float):
            said["milliseconds"] = seconds * 1e3
        if rate:
            said["SamplesPerSec"] = value(rate[1])
        return Said(int(found[1]), said, _FACTS, kind="pipeline")
    return None
