"""Which runs of a text are compared with which, and by how much they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reports.lint.evidence import Evidence

_BASE = re.compile(
    r"^\W*(?:main|base(?:line)?|before|reference|master)\b|\bmain branch\b", re.IGNORECASE
)
_TAKEN_AWAY = re.compile(r"^\W*(?:no|without|w/o)\s+(?P<what>.+)", re.IGNORECASE)


@dataclass(frozen=True)
class EvidencePair:
    """Head against base. Changes are fractions: head over base, minus 1; None is not stated."""

    base: Evidence
    head: Evidence

    def change(self, value: Callable[[Evidence], float | None]) -> float | None:
        """Of any number of the runs; of negative ones, too, a rise is positive."""
        before, after = value(self.base), value(self.head)
        return None if not before or after is None else (after - before) / abs(before)

    @property
    def time(self) -> float | None:
        """Of the time of a step; negative is faster."""
        return None if self.ratio is None else 1 / self.ratio - 1

    @property
    def ratio(self) -> float | None:
        """How many times faster head is: base time over head time, or their rates."""
        before, after = self.base.milliseconds, self.head.milliseconds
        if before and after:
            return before / after
        before, after = self.base.rate, self.head.rate
        return after / before if before and after and not self.devices_differ else None

    @property
    def throughput(self) -> float | None:
        """Of tokens per second, for the same batch; positive is faster."""
        return None if self.ratio is None else self.ratio - 1

    @property
    def loss(self) -> float | None:
        """Of the losses, where they are of the same iteration."""
        same = self.base.iteration == self.head.iteration
        return self.change(lambda run: run.loss) if same else None

    @property
    def lines(self) -> tuple[int, ...]:
        """Of both runs."""
        return tuple(sorted({*self.base.lines, *self.head.lines}))

    @property
    def devices_differ(self) -> bool:
        """Whether the runs ran, or must have run, on other numbers of devices."""
        before, after = (devices_of(run) for run in (self.base, self.head))
        return None not in (before, after) and before != after

    def values(self) -> dict[str, float]:
        """All changes that can be computed, by name; of losses only at the same iteration."""
        same = self.base.iteration == self.head.iteration
        found: dict[str, float | None] = {
            "time_change_percent": _percent(self.time),
            "throughput_change_percent": _percent(self.throughput),
            "ratio": self.ratio,
            "loss_change_percent": _percent(self.loss),
            "grad_norm_change_percent": (
                _percent(self.change(lambda run: run.grad_norm)) if same else None
            ),
            "allocated_change_mib": _mib(self, lambda run: run.allocated_bytes),
            "max_allocated_change_mib": _mib(self, lambda run: run.peak_bytes),
            "allocated_change_percent": _percent(self.change(lambda run: run.allocated_bytes)),
            "max_allocated_change_percent": _percent(self.change(lambda run: run.peak_bytes)),
        }
        return {name: round(value, 4) for name, value in found.items() if value is not None}


def pairs(runs: Sequence[Evidence]) -> list[EvidencePair]:
    """Every run against the nearest run above it that is called main or base, else the first.

    Runs are compared within a model, a sequence length and a batch. A run is compared with the one
    directly above it, too, where that has memory and the base has none.
    """
    found: list[EvidencePair] = []
    for group in _groups(runs):
        base = group[0]
        for at, run in enumerate(group):
            if at == 0:
                continue
            if _BASE.search(run.label):
                base = run
                continue
            found.append(_ordered(base, run))
            with_memory = [one for one in group[:at] if one.peak_bytes and one is not base]
            if run.peak_bytes and not base.peak_bytes and with_memory:
                found.append(_ordered(with_memory[-1], run))
    return found


def all_above(head: Evidence, runs: Sequence[Evidence]) -> list[EvidencePair]:
    """The run against every run of its group above it."""
    for group in _groups(runs):
        if head in group:
            return [EvidencePair(run, head) for run in group[: group.index(head)]]
    return []


def _groups(runs: Sequence[Evidence]) -> Iterator[list[Evidence]]:
    found: dict[object, list[Evidence]] = {}
    for run in runs:
        if (run.milliseconds, run.rate, run.loss) != (None, None, None):
            found.setdefault(problem(run), []).append(run)
    yield from found.values()


def problem(run: Evidence) -> tuple[bool, str | None, int | None, int | None]:
    """What must be alike for two runs to be compared: kind, model, sequence length and batch."""
    solved = run.solution
    model, seq_len = run.model, run.seq_len
    if solved is not None:
        model, seq_len = solved.model, solved.seq_len
    return run.measured, model, seq_len, run.global_batch


def devices_of(run: Evidence) -> int | None:
    """As stated, else as the FLOP formula gives."""
    return run.devices or (None if run.solution is None else run.solution.devices)


def _ordered(base: Evidence, head: Evidence) -> EvidencePair:
    """`No X` is what is new where `X` stands below it."""
    taken = _TAKEN_AWAY.match(base.label)
    if taken is not None and head.label.lower().startswith(taken["what"].lower()[:20]):
        return EvidencePair(head, base)
    return EvidencePair(base, head)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _mib(pair: EvidencePair, value: Callable[[Evidence], float | None]) -> float | None:
    before, after = value(pair.base), value(pair.head)
    return None if before is None or after is None else (after - before) / 2**20
