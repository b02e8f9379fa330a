"""One quantity of a run by step, and how far two such series are apart: the one comparison.

Gates, loss parity, switches, logs and golden values all ask it. What is too far is theirs to say.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Self

Steps = Mapping[int, float]
"""Values by step."""


def stated_steps(samples: Iterable[Any], name: str) -> dict[int, float]:
    """The number of this name, by step, of the steps (of whatever kind) that have it."""
    stated = ((sample.step, getattr(sample, name)) for sample in samples)
    return {step: value for step, value in stated if value is not None}


def relative(base: float, head: float) -> float:
    """(head - base) / |base|; 0 of two that are no number, infinite where one of them is none."""
    if base == head or (math.isnan(base) and math.isnan(head)):
        return 0.0
    if not (math.isfinite(head) and math.isfinite(base)) or base == 0:
        return math.inf
    return (head - base) / abs(base)


def absolute(base: float, head: float) -> float:
    """Head - base; as `relative` of what is no number."""
    is_number = math.isfinite(head) and math.isfinite(base)
    return head - base if is_number else relative(base, head)


@dataclass(frozen=True)
class Gap:
    """Head against base, by step, of the steps of both (one at least), in their order.

    apart: differences. values: of base and head.
    """

    apart: Steps
    values: Mapping[int, tuple[float, float]]

    @classmethod
    def of(
        cls, base: Steps, head: Steps, measure: Callable[[float, float], float] = relative
    ) -> Self | None:
        """None where the two have no step in common."""
        both = {step: (base[step], head[step]) for step in sorted(base.keys() & head.keys())}
        return cls({step: measure(*two) for step, two in both.items()}, both) if both else None

    @property
    def sizes(self) -> list[float]:
        """Without their signs."""
        return [*map(abs, self.apart.values())]

    @property
    def at(self) -> int:
        """The first step with the largest."""
        return max(self.apart, key=lambda step: abs(self.apart[step]))

    @property
    def largest(self) -> float:
        """With its sign."""
        return self.apart[self.at]

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.apart.values())

    @property
    def divergence(self) -> str:
        """The first step at which one side alone is NaN or infinite, and both values; else ""."""
        for step, (base, head) in self.values.items():
            if math.isfinite(base) != math.isfinite(head):
                return f"{head:.6g} at step {step:,}, where the base has {base:.6g}"
        return ""

    def text(self, step: int, shown: str) -> str:
        """`shown`, or both values of this step where no finite number is between them."""
        base, head = self.values[step]
        return shown if math.isfinite(self.apart[step]) else f"{head:.6g}, not {base:.6g}"

    def first(self, beyond: float = 0.0) -> int | None:
        """The first step with one of more than `beyond`."""
        return next((step for step, value in self.apart.items() if abs(value) > beyond), None)


@dataclass(frozen=True)
class Distances:
    """Two numbers that say how far two curves are apart.

    Of losses the largest and the mean. A gradient norm amplifies rounding a hundred times where it
    peaks, so of norms the first step counts, which both sides begin with the same weights, and the
    median of all; infinite where a norm of one side alone is not finite. words: what the two
    numbers are. factor: of the second one's bound.
    """

    of: Callable[[Gap], tuple[float, float]]
    words: tuple[str, str]
    factor: float = 1.0

    def bounds(self, bound: float) -> tuple[float, float]:
        """Of both numbers, where losses may be so far apart."""
        return bound, bound * self.factor

    def first_beyond(self, gap: Gap, bounds: tuple[float, float]) -> int | None:
        """Where one of the two is beyond its bound: the first step that is; else None."""
        both = zip(self.of(gap), bounds, strict=True)
        return next((gap.first(bound) for far, bound in both if far > bound), None)


NORM_FACTOR = 10.0
"""The median difference of gradient norms may be this many times what losses may differ by."""

LOSSES = Distances(lambda gap: (max(gap.sizes), fmean(gap.sizes)), ("at most", "on average"))
NORMS = Distances(
    lambda gap: (gap.sizes[0], math.inf if gap.divergence else median(gap.sizes)),
    ("at the first step", "in the median"),
    NORM_FACTOR,
)


@dataclass(frozen=True)
class Curve:
    """Losses, or gradient norms, of one run by step. digest: SHA-256 of every one, bit for bit.

    steps, values: all of them, or (in a baseline) some of them, the last included.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    digest: str

    @property
    def by_step(self) -> dict[int, float]:
        """Its values, as far as they are kept."""
        return dict(zip(self.steps, self.values, strict=True))

    @classmethod
    def of(cls, by_step: Steps) -> Self:
        """All of a series."""
        text = "\n".join(float(value).hex() for value in by_step.values())
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(tuple(by_step), tuple(by_step.values()), digest)
