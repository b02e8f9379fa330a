"""Which blocks of a plan are there already.

A block is done only as a whole: every arm finished, in one attempt, with today's configuration,
code and inputs (`bench.launch.inputs`), and its record undamaged. Otherwise all of it runs again,
the arms that had finished included: they were measured at another time than what they are to be
compared with. What failed with all of that unchanged would fail again, so it is not repeated
unasked; what was interrupted is, and so is a block of several arms that a fault cost, a few times.

What has a record and runs again says why: nothing is repeated silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.launch.inputs import changed_inputs, code_now
from bench.plan import Plan
from bench.record import FINISHED_GOOD, STOPPED, RunOutline, RunStatus
from bench.spec import ResolvedRun
from sweeps.blocks import Block, PlannedRun, planned_blocks

CodeIdentity = Callable[[ResolvedRun], str]
UNFINISHED = STOPPED | {"running"}
# Anything else that fails (out of memory, NaN, unsupported) would fail again with the same code.
FAULTS = STOPPED | {"crashed", "timeout", "hang"}
DEFAULT_BLOCK_RETRIES = 2

Attempt = dict[str | None, RunOutline]
"""Arm -> its newest run in one attempt at a block."""


@dataclass(frozen=True)
class RunOptions:
    """What to run again, and when to give up.

    force: every run, done or not. retry_failed: runs whose record says they failed.
    max_failures: stop after so many failed runs of this call; None never stops. block_retries: how
    often a block of several arms that a fault cost is started again.
    """

    force: bool = False
    retry_failed: bool = False
    max_failures: int | None = None
    block_retries: int = DEFAULT_BLOCK_RETRIES

    def retries_of(self, block: Block) -> int:
        """How often a fault may cost `block`: a single run may be repeated at any time."""
        return self.block_retries if block.compares else 0


@dataclass(frozen=True)
class PastRun:
    """The record that decides about a planned run.

    `wrong_code`: its ranks found that they import other code than its arm's.
    """

    cell: str
    repeat: int
    run_id: str
    state: str
    reason: str
    arm: str | None = None
    wrong_code: bool = False

    @classmethod
    def of(cls, run_id: str, status: RunStatus, cell: str | None = None) -> PastRun:
        """As its record says; `cell` instead of the recorded one, of two that are the same run."""
        return cls(
            cell or status.cell or "",
            status.repeat,
            run_id,
            status.state,
            status.reason,
            status.arm,
            wrong_code=status.code_proof == "mismatch",
        )


@dataclass(frozen=True)
class MissingBlock:
    """A block to run.

    attempt: the number of its next attempt, counting all that were ever started. faults: attempts
    that were lost with the code of now, and so count against the retries.
    """

    block: Block
    attempt: int = 1
    faults: int = 0


@dataclass(frozen=True)
class Progressed:
    """The blocks of a plan by what is known of them; every block is in exactly one of the three.

    done and failed: as runs, one of every arm, or the one that failed. again: why missing runs that
    have a record run again, a line per reason.
    """

    missing: tuple[MissingBlock, ...]
    done: tuple[PastRun, ...]
    failed: tuple[PastRun, ...]
    again: tuple[str, ...]

    @property
    def missing_runs(self) -> tuple[PlannedRun, ...]:
        """Of the missing blocks, in their order."""
        return tuple(run for missing in self.missing for run in missing.block.runs)


def compare_with_records(
    plan: Plan,
    records: Sequence[RunOutline],
    code_of: Callable[[PlannedRun], str],
    options: RunOptions,
) -> Progressed:
    """Sort the blocks of `plan` by what `records` (oldest first, of this sweep) say.

    A good record outweighs a failed one of the same configuration and code, whichever is newer.

    Args:
        plan: what is requested.
        records: all runs of the sweep.
        code_of: names the code of a run today.
        options: what runs again all the same.
    """
    known = _by_configuration(standing_in(plan, records))
    missing: list[MissingBlock] = []
    done: list[PastRun] = []
    failed: list[PastRun] = []
    for block in planned_blocks(plan):
        own = _runs_of(block, known)
        attempts = [] if options.force else _attempts(block, own, code_of)
        complete = next((a for a in reversed(attempts) if _is_complete(block, a)), None)
        if complete is not None:
            runs_of_it = (complete[arm] for arm in block.arms)
            done += [PastRun.of(run.run_id, run.status, block.cell.id) for run in runs_of_it]
            continue
        lost = [run for attempt in attempts if (run := _failure(attempt)) is not None]
        final = lost and (
            lost[-1].status.state not in FAULTS or len(lost) > options.retries_of(block)
        )
        if final and not options.retry_failed:
            failed.append(PastRun.of(lost[-1].run_id, lost[-1].status, block.cell.id))
        else:
            faults = 0 if options.retry_failed else len(lost)
            started = _attempts_started(block, known) if block.compares else 0
            missing.append(MissingBlock(block, started + 1, faults))
    runs = (run for left in missing for run in left.block.runs)
    again = _lines_of_repeats(runs, newest(records), code_of)
    return Progressed(tuple(missing), tuple(done), tuple(failed), again)


def standing_in(plan: Plan, records: Iterable[RunOutline]) -> list[RunOutline]:
    """Those that may stand for runs of `plan`.

    Runs made one by one and runs of blocks that compare never stand in for each other.
    """
    compares = plan.interleaved and len(plan.arms) > 1
    return [record for record in records if (record.status.attempt is not None) == compares]


def remembered(code_identity: CodeIdentity) -> CodeIdentity:
    """`code_identity`, computed once per engine and model factory: it reads many files."""
    known: dict[tuple[str, str | None], str] = {}

    def ask(resolved: ResolvedRun) -> str:
        name = resolved.engine.name, resolved.factory
        if name not in known:
            known[name] = code_identity(resolved)
        return known[name]

    return ask


_Known = Mapping[int, Mapping[str, Sequence[RunOutline]]]
"""Repeat, configuration -> its runs, oldest first."""


def _by_configuration(records: Iterable[RunOutline]) -> _Known:
    known: dict[int, dict[str, list[RunOutline]]] = {}
    for record in records:
        of_repeat = known.setdefault(record.status.repeat, {})
        of_repeat.setdefault(record.resolved.config_hash, []).append(record)
    return known


def _runs_of(block: Block, known: _Known) -> list[RunOutline]:
    """Runs that were made for `block`, of each arm's own configuration.

    Two cells may have one arm's run in common, so where arms differ the configuration does not name
    the cell.
    """
    cell, of_repeat = block.cell, known.get(block.number, {})
    return [
        record
        for config in dict.fromkeys(cell.of(arm).config_hash for arm in block.arms)
        for record in of_repeat.get(config, ())
        if record.status.arm in block.arms
        and cell.of(record.status.arm).config_hash == config
        and (not cell.by_arm or record.status.cell == cell.id)
    ]


def _attempts_started(block: Block, known: _Known) -> int:
    """The highest number of an attempt at `block` so far, under any configuration of its cell.

    Numbers are never used twice: runs of one attempt belong together, whatever arms they are of.
    """
    return max(
        (
            int(run.status.attempt or 0)
            for config_hash, runs in known.get(block.number, {}).items()
            for run in runs
            if run.status.cell == block.cell.id or config_hash in block.cell.config_hashes
        ),
        default=0,
    )


def _attempts(
    block: Block, runs: Iterable[RunOutline], code_of: Callable[[PlannedRun], str]
) -> list[Attempt]:
    """The attempts at a block, oldest first, without runs of other code; a single run is one."""
    codes = {run.arm: code_of(run) for run in block.runs}
    attempts: dict[int, Attempt] = {}
    for count, record in enumerate(runs):
        status = record.status
        if code_now(codes[status.arm], status) == status.code and status.code_proof != "mismatch":
            attempts.setdefault(status.attempt or count, {})[status.arm] = record
    return [attempts[number] for number in sorted(attempts)]


def _is_complete(block: Block, attempt: Attempt) -> bool:
    """Every arm of the block finished, and its record is whole."""
    return all(arm in attempt and attempt[arm].is_whole for arm in block.arms)


def _failure(attempt: Attempt) -> RunOutline | None:
    """The run that cost an attempt; None if it was stopped."""
    settled = {*FINISHED_GOOD, *UNFINISHED}
    return next((run for run in attempt.values() if run.status.state not in settled), None)


_MOST_NAMED = 3
_NO_FAULT = "another run of its block does not count, or it was requested"


def _lines_of_repeats(
    runs: Iterable[PlannedRun], by_key: Newest, code_of: Callable[[PlannedRun], str]
) -> tuple[str, ...]:
    """One line per reason, with the runs that it holds for; runs without any record have none."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        past = by_key.get((run.cell.of(run.arm).config_hash, run.repeat, run.arm))
        past = past or by_key.get((run.cell.id, run.repeat, run.arm))
        if past is not None:
            by_reason.setdefault(_reason(run, past, code_of), []).append(_name(run))
    return tuple(f"again: {named(names)}: {reason}" for reason, names in by_reason.items())


Newest = Mapping[tuple[str, int, str | None], RunOutline]
"""(Configuration or cell, repeat, arm) -> the newest record."""


def newest(records: Iterable[RunOutline]) -> Newest:
    """Of records that are ordered from the oldest on."""
    latest: dict[tuple[str, int, str | None], RunOutline] = {}
    for record in records:
        status = record.status
        latest[record.resolved.config_hash, status.repeat, status.arm] = record
        latest[status.cell or "", status.repeat, status.arm] = record
    return latest


def _reason(run: PlannedRun, past: RunOutline, code_of: Callable[[PlannedRun], str]) -> str:
    status = past.status
    if past.resolved.config_hash != run.cell.of(run.arm).config_hash:
        return "the settings of the cell have changed since its last run"
    if status.code_proof == "mismatch":
        return "its ranks had imported other code than they should"
    changed = (
        changed_inputs(status.inputs)
        if status.is_of(code_of(run))
        else ["the code that it measures"]
    )
    if changed:
        return f"{named(changed)} changed since its last run"
    if past.damage:
        return f"its record is damaged ({past.damage[0]})"
    if status.state in FINISHED_GOOD:
        return _NO_FAULT
    return f"its last run ended as {status.state}"


def _name(run: PlannedRun) -> str:
    name = run.cell.id if run.repeat == 0 else f"{run.cell.id} (repeat {run.repeat})"
    return f"{name} [{run.arm}]" if run.arm else name


def named(names: Iterable[str]) -> str:
    """Each once; of many the first few, and how many more."""
    each = list(dict.fromkeys(names))
    more = len(each) - _MOST_NAMED
    return ", ".join(each[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
