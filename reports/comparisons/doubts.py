"""What two runs beside each other make doubtful, and what one is bought with. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from reports.renderers import quantity

_SAME_TIME = 0.01
_OTHER_RATE = 0.03
_OTHER_NORM = 0.05
_SAME_LOSS = 0.01
_ROUND = 0.03
_MOST_STEPS = 0.95
_LEAST_STEPS = 3
_LEAST_DEVICES = 4  # a factor of two can have any cause


def rate_without_time(time: float | None, rates: Mapping[str, float | None]) -> list[str]:
    """One text per rate that changes while the time of a step does not.

    Args:
        time: step time, head over base.
        rates: by name, head over base.
    """
    if time is None or abs(time - 1) >= _SAME_TIME:
        return []
    found = []
    for name, rate in rates.items():
        if rate is None or abs(rate - 1) <= _OTHER_RATE:
            continue
        what = "formula, model" if "FLOP" in name else "tokens per step"
        found.append(
            f"{name} {quantity.ratio(rate)} at the same step time"
            f" ({quantity.change(time - 1, 2)}): {what} or device count differ"
        )
    return found


def trade_off(time: float | None, memory: float | None) -> str:
    """Speed that is bought with memory, or memory with time; both are head over base. Else "".

    Steps of one run say nothing of noise, so changes below 1 % of either are none.
    """
    if time is None or memory is None or min(abs(time - 1), abs(memory - 1)) < _SAME_TIME:
        return ""
    if (time < 1) == (memory < 1):
        return ""
    words = "faster, but with more memory" if time < 1 else "less memory, but slower"
    changes = (quantity.change(one - 1, 2) for one in (time, memory))
    return "{}: time {}, peak of a device {}".format(words, *changes)


def norm_without_loss(
    losses: tuple[Mapping[int, float], Mapping[int, float]],
    norms: tuple[Mapping[int, float], Mapping[int, float]],
    devices: int | None = None,
) -> str:
    """Gradient norms that differ steadily, in one direction, though losses do not; else "".

    Args:
        losses: by step, of base and head.
        norms: the same of gradient norms.
        devices: of both runs, to name the factor by.
    """
    apart = [abs(after / before - 1) for before, after in _both(losses)]
    factors = [after / before for before, after in _both(norms)]
    if min(len(apart), len(factors)) < _LEAST_STEPS:
        return ""
    middle = median(factors)
    beyond = [
        factor > 1 + _OTHER_NORM if middle > 1 else factor < 1 - _OTHER_NORM for factor in factors
    ]
    alike = [one <= _SAME_LOSS for one in apart]
    if not all(sum(one) >= _MOST_STEPS * len(one) for one in (beyond, alike)):
        return ""
    least, most = (quantity.ratio(one) for one in (min(factors), max(factors)))
    span = "" if least == most else f" ({least} to {most})"
    return (
        f"the gradient norm differs steadily and the loss does not: head / base"
        f" {quantity.ratio(middle)}{span} over {len(factors)} steps, losses within"
        f" {quantity.share(max(apart), 2)}{_named(max(middle, 1 / middle), devices)}"
    )


def _both(values: tuple[Mapping[int, float], Mapping[int, float]]) -> list[tuple[float, float]]:
    base, head = values
    pairs = [(base[step], head[step]) for step in sorted(base.keys() & head.keys())]
    return [pair for pair in pairs if all(one > 0 and math.isfinite(one) for one in pair)]


def _named(factor: float, devices: int | None) -> str:
    if devices is None or devices < _LEAST_DEVICES:
        return ""
    for size, words in ((devices, "the number"), (math.sqrt(devices), "the root of the number")):
        if abs(factor / size - 1) <= _ROUND:
            return f"; the factor is {words} of devices ({devices})"
    return ""
