"""What the FLOP formula says of a log: the sequence length and the devices that its rate implies.

Nothing is tried but the model that the text names, and nothing counts that is further off than 2 %.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from bench.derive.flops import flops_per_global_batch
from bench.spec import ModelShape
from reports.comparisons.imported import Shown
from reports.renderers import quantity

_NEAR = 0.02
_LENGTHS = tuple(2**power for power in range(8, 18))
_MOST_DEVICES = 2**14
_SIZE = re.compile(r"llama.*?(\d+(?:\.\d+)?)\s?b\b", re.IGNORECASE)
_PRESET = re.compile(r"(?:llama\d?-)?(\d+(?:\.\d+)?)b")


def flops_doubt(run: Shown, shapes: Mapping[str, ModelShape]) -> str:
    """That what is stated contradicts the rate, or the length and devices that it implies.

    "" where nothing is known: no named model, batch, time or rate, or no single solution.
    """
    work, time, rate = run.workload, run.milliseconds, run.pace.teraflops_per_device
    shape = _named(work.model, shapes)
    if shape is None or not time or not rate or not work.global_batch:
        return ""
    done = rate * 1e12 * time / 1e3
    exact = {
        length: flops_per_global_batch(shape, length, work.global_batch) / done
        for length in ({work.seq_len} if work.seq_len else _LENGTHS)
        if length
    }
    found = list(_solutions(exact, work.ranks))
    stated = f"{work.model}, global batch {work.global_batch:,}, {rate:g} TFLOP/s per device"
    if work.seq_len and work.ranks and not found:
        times = quantity.ratio(exact[work.seq_len] / work.ranks)
        return (
            f"{run.name} contradicts the FLOP formula: sequence length {work.seq_len:,} on"
            f" {quantity.counted(work.ranks, 'device')} would be {times} its rate ({stated})"
        )
    if len(found) != 1 or (work.seq_len and work.ranks):
        return ""
    length, devices = found[0]
    return (
        f"{run.name}: the FLOP formula gives sequence length {length:,} on"
        f" {quantity.counted(devices, 'device')} ({stated})"
    )


def _solutions(exact: Mapping[int, float], ranks: int | None) -> Iterator[tuple[int, int]]:
    """Lengths, and the devices stated or a power of two, that are within 2 % of the rate."""
    for length, devices in exact.items():
        near = ranks or 1 << max(round(devices * 2**0.5).bit_length() - 1, 0)
        if near <= _MOST_DEVICES and abs(devices / near - 1) <= _NEAR:
            yield length, near


def _named(model: str | None, shapes: Mapping[str, ModelShape]) -> ModelShape | None:
    """The preset that a text names, by its own name or as a Llama of its size."""
    if model is None:
        return None
    size = _SIZE.search(model.replace("_", " "))
    for name, shape in shapes.items():
        own = _PRESET.fullmatch(name)
        if model == name or (size and own and size[1] == own[1]):
            return shape
    return None
