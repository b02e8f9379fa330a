"""Cells of a report: the runs of one point of a sweep, newest code first, with derived numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.derive.metrics import LEDGER_PEAK, Metric
from bench.derive.summary import summarise
from bench.record import FINISHED_GOOD, STOPPED, RunRecord, RunSummary
from bench.spec import ResolvedRun, find_engine
from reports.renderers import quantity

RunClass = Literal["measured", "unsteady", "failed", "stopped", "damaged", "running"]


@dataclass(frozen=True)
class Run:
    """A record and what is derived from it."""

    record: RunRecord
    summary: RunSummary

    @classmethod
    def of(cls, record: RunRecord) -> Run:
        """Derive the numbers of `record`; a summary kept on disk is never read."""
        return cls(record, summarise(record))

    def value(self, metric: Metric) -> float | None:
        """The metric of this run."""
        return metric.of(self.record, self.summary)

    @property
    def kind(self) -> RunClass:
        """How the run counts.

        Damage outranks success, because what is left of the numbers would not be all of them. A
        run that was killed may well have a last line cut off: it stays failed or stopped, unless
        the damage is in the status that says so.
        """
        state, problems = self.record.status.state, self.record.problems
        if state == "running":
            return "running"
        if state not in FINISHED_GOOD:
            if any("status.json" in text for text in problems):
                return "damaged"
            return "stopped" if state in STOPPED else "failed"
        if self.record.damage:
            return "damaged"
        return "measured" if self.summary.step_milliseconds_median is not None else "unsteady"

    @property
    def finished(self) -> bool:
        """Whether losses and memory stand, steady or not."""
        return self.kind in ("measured", "unsteady")


@dataclass(frozen=True)
class Cell:
    """One point of a sweep. `runs`: one per repeat, all of one configuration and one code.

    `superseded` counts other runs of the same repeats (other code, or retried failures).
    failed_since: runs of this code that failed after one of `runs` had finished.
    """

    name: str
    runs: tuple[Run, ...]
    superseded: int = 0
    failed_since: tuple[Run, ...] = ()

    @property
    def resolved(self) -> ResolvedRun:
        """The configuration, the same in all runs."""
        return self.runs[0].record.resolved

    def is_same(self, other: Cell) -> bool:
        """Whether both are one configuration of one code and one arm, under whatever names."""
        ours, theirs = self.runs[0].record, other.runs[0].record
        return _identity(ours) == _identity(theirs) and self.arm == other.arm

    @property
    def arm(self) -> str | None:
        """The side of a comparison that its runs were made for; None without arms."""
        return self.runs[0].record.status.arm

    @property
    def name_without_arm(self) -> str:
        """The same for all arms of a cell."""
        return self.name.removesuffix(f" [{self.arm}]")

    @property
    def block_name(self) -> tuple[str, str]:
        """The arm and the cell, as comparisons of arms call them."""
        status = self.runs[0].record.status
        return f"{status.sweep} [{status.arm}]", status.cell or self.name

    @property
    def measured(self) -> tuple[Run, ...]:
        """Runs whose times count."""
        return tuple(run for run in self.runs if run.kind == "measured")

    @property
    def finished(self) -> tuple[Run, ...]:
        """Runs whose losses and memory count."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def n(self) -> int:
        """Runs behind the cell's time: the unit of replication is a run, not a step."""
        return len(self.measured)

    def values(self, metric: Metric) -> list[float]:
        """The number of every run that has it."""
        numbers = (run.value(metric) for run in self.finished)
        return [value for value in numbers if value is not None]

    def value(self, metric: Metric) -> float | None:
        """Median over runs of the runs' numbers."""
        values = self.values(metric)
        return median(values) if values else None

    def text(self, metric: Metric) -> str:
        """`value` in its unit, behind `bound_sign`."""
        return self.bound_sign(metric) + quantity.amount(self.value(metric), metric.unit)

    def bound_sign(self, metric: Metric) -> str:
        """`<= ` of a ledger's peak that is a bound, else ""."""
        is_peak = metric is LEDGER_PEAK and self.value(metric) is not None
        return "<= " if is_peak and not self.ledger_is_measured else ""

    @property
    def ledger(self) -> dict[str, int]:
        """Bytes by category of the first finished run that kept them.

        At the peak of a step if `ledger_is_measured`, else the highest of each category.
        """
        run = self._with_ledger
        return run.summary.memory_by_category_bytes if run else {}

    @property
    def ledger_is_measured(self) -> bool:
        """Whether the categories of `ledger` were held at one moment."""
        return self._with_ledger is not None and self._with_ledger.summary.ledger_is_measured

    @property
    def _with_ledger(self) -> Run | None:
        return next((run for run in self.finished if run.summary.memory_by_category_bytes), None)

    @property
    def dtypes(self) -> str:
        """The dtype policy in a few words, as `bf16, comm fp32`."""
        return dtype_policy(self.resolved)

    @property
    def residual_stream(self) -> str:
        """What layers add up in, where autocast leaves it in the dtype of the weights, else ""."""
        row, dtypes = find_engine(self.resolved.engine.name), self.resolved.dtypes
        main = dtypes.main_params or dtypes.compute
        by_autocast = row is not None and row.dtypes.autocast and main != dtypes.compute
        return f", residual stream {main}" if by_autocast else ""


def dtype_policy(resolved: ResolvedRun) -> str:
    """Compute dtype, then every dtype that differs from what a reader would assume."""
    dtypes = resolved.dtypes
    words: list[str] = [dtypes.compute]
    main = dtypes.main_params or dtypes.compute
    if main != dtypes.compute:
        words.append(f"main {main}")
    if dtypes.main_grads != main:
        words.append(f"grads {dtypes.main_grads}")
    if dtypes.grad_comm != dtypes.main_grads:
        words.append(f"comm {dtypes.grad_comm}")
    if dtypes.reduce not in (None, dtypes.grad_comm):
        words.append(f"sums {dtypes.reduce}")
    recipe = resolved.engine.setting("recipe") or "none"
    if resolved.linear.kind != "torch":
        words.append(f"{resolved.linear.kind} {resolved.linear.recipe} layers")
    if resolved.linear.quantised_weights:
        words.append("quantised weights")
    if recipe != "none":
        words.append(f"{recipe} weights")
    return ", ".join(words)


def make_cell(name: str, members: Iterable[RunRecord], code: str | None = None) -> Cell:
    """The cell made of `members` (at least one), all of one sweep, cell and arm.

    The newest configuration and code counts, or `code` where there is a run of it; of each repeat
    the newest run that finished, or the newest if none did. Everything else is counted as
    superseded.
    """
    ordered = sorted(members, key=_started)
    of_code = [r for r in ordered if r.status.is_of(code)] if code else []
    newest = next((r for r in reversed(of_code or ordered) if r.status.code), ordered[-1])
    by_repeat: dict[int, Run] = {}
    since: dict[int, Run] = {}
    for record in ordered:
        if _identity(record) != _identity(newest):
            continue
        run, repeat = Run.of(record), record.status.repeat
        if run.finished or repeat not in by_repeat or not by_repeat[repeat].finished:
            by_repeat[repeat] = run
            since.pop(repeat, None)
        else:
            since[repeat] = run
    runs = tuple(by_repeat[repeat] for repeat in sorted(by_repeat))
    failed = tuple(run for run in since.values() if run.kind == "failed")
    return Cell(name, runs, superseded=len(ordered) - len(runs), failed_since=failed)


def _identity(record: RunRecord) -> tuple[str, str]:
    return record.resolved.config_hash, record.status.code


def _started(record: RunRecord) -> tuple[str, str]:
    """The folder's time stamp, which is later than that of every run before it."""
    return record.run_id.rpartition("/")[2], record.run_id
