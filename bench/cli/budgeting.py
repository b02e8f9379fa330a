"""Chooses blocks until every required comparison is decided, or a budget of time is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from bench.cli.duration import duration
from bench.derive.blocks import complete_blocks
from bench.record import RunRecord
from bench.store import ResultsStore
from reports.gates.budget import ComparisonStatus, next_cell, statuses
from reports.gates.noise import calibrations
from reports.gates.pairing import Pair, pair_of_arms
from reports.gates.policy import Policy
from reports.renderers import quantity
from sweeps.plan import Plan
from sweeps.resume import PastRun


@dataclass
class BlockBudget:
    """Chooses the next block (`sweeps.until_decided.Chooser`) and tells what it finds.

    The clock starts with the first block that is asked for.

    plan: whose cells are compared, with prepared arms. arms: (base, head) of every comparison.
    policy: what is required. seconds: the budget. store: the results folder, whose blocks of
    today's code count.
    """

    plan: Plan
    arms: Sequence[tuple[str, str]]
    policy: Policy
    seconds: float
    store: ResultsStore

    def __post_init__(self) -> None:
        arms = self.plan.arms
        self._calibrations = calibrations(self.store)
        codes = {(cell, arm.name): code for arm in arms for cell, code in arm.codes.items()}
        self._records: dict[str, list[RunRecord]] = {cell.id: [] for cell in self.plan.cells}
        for record in self.store.records(sweep=self.plan.id):
            status = record.status
            of_today = codes.get((status.cell or "", status.arm or ""), status.code) == status.code
            if status.cell in self._records and of_today:
                self._records[status.cell].append(record)
        self._pairs = {cell: self._paired(cell) for cell in self._records}
        self._took: dict[str, list[float]] = {}
        self._given_up: list[str] = []
        self._begun: float | None = None
        self._block_begun = 0.0
        self._decided: set[tuple[str, str, str]] = set()
        self.comparisons = self._compared()
        self._newly_decided()

    @property
    def spent_seconds(self) -> float:
        """Since the first block was asked for."""
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    @property
    def block_seconds(self) -> dict[str, float]:
        """What a block of each cell took in this call."""
        return {cell: fmean(took) for cell, took in self._took.items()}

    def next_cell(self) -> str | None:
        """The cell whose block helps most; None if all is decided or the budget is spent."""
        now = time.monotonic()
        self._begun = now if self._begun is None else self._begun
        self._block_begun = now
        return next_cell(
            self.comparisons,
            self.block_seconds,
            self.seconds - (now - self._begun),
            without_block=[cell for cell, pairs in self._pairs.items() if not pairs],
            given_up=self._given_up,
        )

    def block_ended(self, cell: str, runs: Sequence[PastRun] | None) -> list[str]:
        """Count a block, and tell what it has decided."""
        if runs is None:
            self._given_up.append(cell)
            return []
        self._took.setdefault(cell, []).append(time.monotonic() - self._block_begun)
        self._records[cell] += [self.store.read(run.run_id) for run in runs]
        self._pairs[cell] = self._paired(cell)
        self.comparisons = self._compared()
        return [
            f"{self._name(one)} {one.verdict} after {quantity.counted(one.starts, 'block')}"
            for one in self._newly_decided()
        ]

    def closing_lines(self) -> list[str]:
        """How much was decided, and what the rest would need."""
        still = [one for one in self.comparisons if one.open]
        decided = len(self.comparisons) - len(still)
        lines = [
            f"{decided} of {len(self.comparisons)} comparisons decided in"
            f" {duration(self.spent_seconds)} of {duration(self.seconds)}"
        ]
        seconds = self.block_seconds
        lines += [
            f"  {one.cell}: {one.metric} {_need(one, seconds.get(one.cell))}" for one in still
        ]
        return lines

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "seconds": self.seconds,
            "spent_seconds": self.spent_seconds,
            "block_seconds": self.block_seconds,
            "comparisons": [asdict(one) for one in self.comparisons],
        }

    def _paired(self, cell: str) -> list[Pair]:
        """A pair for every comparison, none of them without a block."""
        found = []
        for base, head in self.arms:
            blocks = complete_blocks(self._records[cell], [base, head]).get(cell, [])
            if not blocks:
                return []
            found.append(pair_of_arms(cell, blocks, base, head, sequential=True))
        return found

    def _compared(self) -> list[ComparisonStatus]:
        found = []
        for index, (_, head) in enumerate(self.arms):
            pairs = [pairs[index] for pairs in self._pairs.values() if pairs]
            judged = statuses(pairs, self.policy, self._calibrations, len(self._records))
            found += [replace(one, head=head) for one in judged]
        return found

    def _newly_decided(self) -> list[ComparisonStatus]:
        """Comparisons that are decided and were not before."""
        found = []
        for one in self.comparisons:
            key = (one.cell, one.metric, one.head)
            if not one.open and key not in self._decided:
                self._decided.add(key)
                found.append(one)
        return found

    def _name(self, one: ComparisonStatus) -> str:
        arm = f", {one.head}" if len(self.arms) > 1 else ""
        return f"{one.cell}{arm}: {one.metric}"


def _need(one: ComparisonStatus, block_seconds: float | None) -> str:
    if math.isinf(one.more_starts):
        return "is undecided: the change lies on the tolerance itself, more blocks will not help"
    blocks = quantity.counted(math.ceil(one.more_starts), "more block")
    takes = "" if block_seconds is None else f", {duration(one.more_starts * block_seconds)}"
    return f"is undecided after {quantity.counted(one.starts, 'block')}: about {blocks}{takes}"
