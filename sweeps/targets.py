"""Targets of a sweep with arms: how large head / base of a metric may be, cell by cell.

A target says what a comparison is made for, before it is made. It is kept in `plan.json`, so that a
report judges the records by what was asked when they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeps.matrix import Condition, MatrixCell
from sweeps.plan import PlannedTarget


@dataclass(frozen=True)
class Target:
    """For the cells that match `when`: head / base of each metric is to be at most so much."""

    when: Condition
    base: str
    head: str
    at_most: Mapping[str, float]


@dataclass(frozen=True)
class KernelRequirement:
    """For the cells that match `when`: the kernels that NCCL's logs are to show.

    nccl: terms as `AG=sym,RS=sym`, which `reports.nccl.requirement` reads. after_iteration,
    min_bytes: which calls count.
    """

    when: Condition
    nccl: str
    after_iteration: int | None
    min_bytes: int


def planned_targets(
    targets: Iterable[Target], cells: Sequence[MatrixCell]
) -> tuple[PlannedTarget, ...]:
    """The targets of every cell, in the order of the cells."""
    wanted = list(targets)
    return tuple(
        PlannedTarget(cell.id, target.base, target.head, metric, bound)
        for cell in cells
        for target in wanted
        if target.when.matches(cell)
        for metric, bound in target.at_most.items()
    )
