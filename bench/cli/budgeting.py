"""Chooses blocks until every required comparison is decided, or a budget of time is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from bench.cli.duration import duration
from bench.derive.blocks import complete_blocks
from bench.derive.metrics import STEP_TIME
from bench.record import RunRecord
from bench.store import ResultsStore
from reports.gates.budget import (
    POWER,
    ComparisonStatus,
    Forecast,
    forecast,
    needs_blocks,
    next_cell,
    statuses,
)
from reports.gates.gate import Calibrations, case_of
from reports.gates.noise import CellNoise, NoiseCalibration
from reports.gates.pairing import Codes, Pair, pair_of_arms
from reports.gates.policy import Policy
from reports.gates.spread import spread_of, spread_text
from reports.renderers import quantity
from sweeps.plan import PlannedCell
from sweeps.progress import Remark, Subscriber, ignore
from sweeps.resume import PastRun

_STARTS_BEFORE_A_FORECAST = 3


@dataclass(frozen=True)
class BudgetRequest:
    """What is to be decided.

    arms: (base, head) of every comparison. codes: cell and arm -> the code whose blocks count.
    """

    sweep: str
    cells: tuple[PlannedCell, ...]
    arms: tuple[tuple[str, str], ...]
    policy: Policy
    calibrations: Calibrations
    budget_seconds: float
    codes: Codes = field(default_factory=dict)


class BlockBudget:
    """Chooses the next block (`sweeps.until_decided.Chooser`) and says what it expects and finds.

    The clock starts with the first block that is asked for.
    """

    def __init__(
        self,
        request: BudgetRequest,
        store: ResultsStore,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._store = store
        self._clock = clock
        self.publish: Subscriber = ignore
        self._cells = {cell.id: cell for cell in request.cells}
        self._records: dict[str, list[RunRecord]] = {cell: [] for cell in self._cells}
        for record in store.records(sweep=request.sweep):
            status = record.status
            of_today = (
                request.codes.get((status.cell or "", status.arm), status.code) == status.code
            )
            if status.cell in self._records and of_today:
                self._records[status.cell].append(record)
        self._pairs = {cell: self._paired(cell) for cell in self._cells}
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
        return 0.0 if self._begun is None else self._clock() - self._begun

    @property
    def block_seconds(self) -> dict[str, float]:
        """What a block takes: measured by this call, else known from a calibration."""
        known = {cell: one.block_seconds for cell, one in self._noise.items() if one.block_seconds}
        return known | {cell: fmean(took) for cell, took in self._took.items()}

    @property
    def expected_blocks(self) -> int:
        """Blocks that the budget has room for, 0 while nobody knows how long one takes."""
        seconds = self.block_seconds
        return int(self._request.budget_seconds / fmean(seconds.values())) if seconds else 0

    def next_cell(self) -> str | None:
        """The cell whose block helps most; None if all is decided or the budget is spent."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        self._block_begun = now
        return next_cell(
            self.comparisons,
            self.block_seconds,
            self._request.budget_seconds - (now - self._begun),
            without_block=[cell for cell, pairs in self._pairs.items() if not pairs],
            given_up=self._given_up,
        )

    def block_ended(self, cell: str, runs: Sequence[PastRun] | None) -> None:
        """Count a block, and say what it has decided."""
        if runs is None:
            self._given_up.append(cell)
            return
        self._took.setdefault(cell, []).append(self._clock() - self._block_begun)
        self._records[cell] += [self._store.read(run.run_id) for run in runs]
        self._pairs[cell] = self._paired(cell)
        self.comparisons = self._compared()
        for one in self._newly_decided():
            blocks = quantity.counted(one.starts, "block")
            self._say(f"{self._name(one)} {one.verdict} after {blocks}")
        if any(one.cell == cell and one.open for one in self.comparisons):
            self._say_what_to_expect(cell)

    def opening_lines(self) -> list[str]:
        """What the budget can find, from the noise calibration of this results folder."""
        budget, seconds = duration(self._request.budget_seconds), self.block_seconds
        if not self._judges_step_time:
            names = [m.name for m, r in self._request.policy.active() if needs_blocks(m, r)]
            what = ", ".join(names) or "nothing that is required needs more than one block"
            return [f"budget {budget}, for {what}; forecasts are made of step_time only"]
        lines = []
        for cell, known in self._noise.items():
            if cell in seconds:
                starts = self._starts(self._request.budget_seconds, seconds)
                request = self._request.policy.rules[STEP_TIME.name].tolerance or 0.0
                found = self._forecast(starts, known.spread, max(request, known.floor))
                lines.append(f"budget {budget}, {cell}: {found}")
        return lines or [
            f"budget {budget}: no noise calibration in this results folder knows these cells; what"
            f" can be found is said after {_STARTS_BEFORE_A_FORECAST} blocks of a cell"
        ]

    def closing_lines(self) -> list[str]:
        """How much was decided, what the rest would need, and where the spread comes from."""
        still = [one for one in self.comparisons if one.open]
        decided = len(self.comparisons) - len(still)
        lines = [
            f"{decided} of {len(self.comparisons)} comparisons decided in"
            f" {duration(self.spent_seconds)} of {duration(self._request.budget_seconds)}"
        ]
        seconds = self.block_seconds
        lines += [
            f"  {one.cell}: {one.metric} {_need(one, seconds.get(one.cell))}" for one in still
        ]
        for cell, pairs in self._pairs.items():
            spread = spread_of(pairs[0]) if pairs else None
            if spread is not None:
                steps = self._cells[cell].resolved.train.steps
                lines.append(f"  {cell}: {spread_text(spread, steps)}")
        return lines

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "seconds": self._request.budget_seconds,
            "spent_seconds": self.spent_seconds,
            "block_seconds": self.block_seconds,
            "comparisons": [asdict(one) for one in self.comparisons],
        }

    def _paired(self, cell: str) -> list[Pair]:
        """A pair for every comparison, none of them without a block."""
        found = []
        for base, head in self._request.arms:
            blocks = complete_blocks(self._records[cell], [base, head]).get(cell, [])
            if not blocks:
                return []
            found.append(pair_of_arms(cell, blocks, base, head, sequential=True))
        return found

    def _compared(self) -> list[ComparisonStatus]:
        found = []
        request = self._request
        for index, (_, head) in enumerate(request.arms):
            pairs = [pairs[index] for pairs in self._pairs.values() if pairs]
            judged = statuses(pairs, request.policy, request.calibrations, len(request.cells))
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

    def _say_what_to_expect(self, cell: str) -> None:
        """Once, as soon as the cell's own blocks tell its spread."""
        spread = spread_of(self._pairs[cell][0]) if self._judges_step_time else None
        rule = self._request.policy.rules[STEP_TIME.name]
        if spread is None or round(len(self._took[cell])) != _STARTS_BEFORE_A_FORECAST:
            return
        left = self._request.budget_seconds - self.spent_seconds
        starts = _STARTS_BEFORE_A_FORECAST + self._starts(left, self.block_seconds)
        case = case_of(self._pairs[cell][0], STEP_TIME, rule, self._request.calibrations)
        self._say(f"{cell}: {self._forecast(starts, spread.deviation, case.tolerance)}")

    def _starts(self, seconds: float, block_seconds: dict[str, float]) -> int:
        """Blocks of each cell, if all get the same number."""
        usual = fmean(block_seconds.values())
        return int(seconds / sum(block_seconds.get(cell, usual) for cell in self._cells))

    def _forecast(self, starts: int, spread: float, tolerance: float) -> str:
        found = forecast(
            starts, spread, tolerance, alpha=self._request.policy.alpha, cells=len(self._cells)
        )
        return forecast_text(found, spread, tolerance)

    @cached_property
    def _noise(self) -> dict[str, CellNoise]:
        """Cell -> its newest calibration of step time in this results folder."""
        names = self._store.noise.names()
        known = [NoiseCalibration.from_document(self._store.noise.read(name)) for name in names]
        by_config = {
            cell.config_hash: cell
            for calibration in sorted(known, key=lambda one: one.measured_utc)
            for cell in calibration.cells
            if cell.metric == STEP_TIME.name
        }
        return {
            cell.id: by_config[config]
            for cell in self._request.cells
            for config in cell.config_hashes
            if config in by_config
        }

    @property
    def _judges_step_time(self) -> bool:
        return self._request.policy.rules[STEP_TIME.name].gate == "required"

    def _name(self, one: ComparisonStatus) -> str:
        arm = f", {one.head}" if len(self._request.arms) > 1 else ""
        return f"{one.cell}{arm}: {one.metric}"

    def _say(self, text: str) -> None:
        self.publish(Remark(text))


def forecast_text(found: Forecast, spread: float, tolerance: float) -> str:
    """What to expect of a budget, in a sentence."""
    blocks = quantity.counted(found.starts, "block")
    within = f"about {blocks}, one varies by {quantity.share(spread)}"
    if found.finds is None:
        finds = "too little to decide anything" if not found.equivalent else "finds no change"
    else:
        finds = (
            f"finds a slow-down of {quantity.share(found.finds)} or more with a chance of "
            f"{quantity.share(POWER, 0)}"
        )
    equal = quantity.share(found.equivalent, 0)
    return f"{within}: {finds}; identical code is called equivalent (tolerance " + (
        f"{quantity.share(tolerance)}) with a chance of {equal}"
    )


def _need(one: ComparisonStatus, block_seconds: float | None) -> str:
    if math.isinf(one.more_starts):
        return "is undecided: the change lies on the tolerance itself, more blocks will not help"
    blocks = quantity.counted(math.ceil(one.more_starts), "more block")
    takes = "" if block_seconds is None else f", {duration(one.more_starts * block_seconds)}"
    return f"is undecided after {quantity.counted(one.starts, 'block')}: about {blocks}{takes}"
