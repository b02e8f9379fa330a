"""`gate`: verdicts by a policy, an exit code, and what CI systems want to read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.import_ import is_log, runs_of_log
from bench.cli.verb import (
    Answer,
    ArmsOption,
    BudgetOption,
    PolicyOption,
    ResultsOption,
    argument,
    option,
)
from bench.errors import UsageError
from reports.renderers.document import Code
from reports.renderers.render import render

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from reports.compare.baseline import Baseline
    from reports.compare.judge import Verdicts
    from reports.compare.policy import Policy
    from reports.compare.sides import JudgedSweep, Sides
    from sweeps.budget import BlockBudget
    from sweeps.selected_sweep import SelectedSweep

_BASELINE = b'"baseline_version"'
_HEAD_BYTES = 4096


class GateVerb(BudgetOption, PolicyOption, ArmsOption, ResultsOption, name="gate"):
    """Judge a sweep; the exit code is the verdict.

    It is compared with its other arm, with another sweep or with a baseline. With --budget, blocks
    of both arms are run first, until the time is spent. A sweep file and its arms are looked up as
    `run` does: what was measured must be what they are now. Exit codes: 0 passed, 1 regressed,
    3 a cell was not measured, 4 undecided (with --strict), 5 not comparable.

    Examples:
        gate my.yaml --arm base=main --arm head=. --junit gate.xml
        gate nightly --baseline main --strict
    """

    sweep: str = argument(
        "SWEEP", "A sweep id, a sweep file, an imported run, or a log or file of CI."
    )
    against: str | None = option("--against SWEEP", "Another sweep, or an imported run, as base.")
    baseline: str | None = option(
        "--baseline NAME|FILE", "A baseline, or a file: a baseline's, golden values, a log."
    )
    base_arm: str | None = option("--base ARM", "The arm to compare with.")
    head_arm: str | None = option("--head ARM", "The arm to judge.")
    confirm: int = option("--confirm N", "More blocks to run before it fails.", 0, min=0)
    only: tuple[str, ...] = option("--only CELL", "Judge this cell only: an id, or a pattern.", ())
    any_nodes: bool = option("--any-nodes", "Compare what different nodes have measured.", False)
    strict: bool = option("--strict", "Undecided is exit code 4.", False)
    junit: Path | None = option("--junit FILE", "Write JUnit XML.")
    markdown: Path | None = option("--markdown FILE", "Write Markdown.")
    github: bool = option("--github", "Annotations and the step summary of GitHub Actions.", False)

    def run(self) -> Answer:
        """Judge, and write the files that options name."""
        if self.against and self.baseline:
            raise UsageError("--against and --baseline both name what to compare with; give one")
        if (self.confirm or self.budget) and (self.against or self.baseline):
            name = "--budget" if self.budget else "--confirm"
            raise UsageError(f"{name} runs blocks of two arms; leave --against and --baseline out")
        if self.confirm and self.budget:
            raise UsageError("--budget runs blocks itself; leave --confirm out")
        from bench.cli.judged_sweep import judged_sweep
        from reports.compare.judge import judge

        policy, seconds, budget = self.rules(), self.budget_seconds(), None
        if is_log(self.sweep):
            return self._answer(judge(self._of_files(), policy))
        if seconds is not None:
            sweep, budget = self._measured(seconds)
        store = self.store()
        if budget is None:
            sweep = judged_sweep(store, self.sweep, self.arms)
        result = self._judged(store, sweep, policy)
        if self.confirm and result.regressed:
            result = self._confirmed(store, sweep, result)
        return self._answer(result, budget)

    def _answer(self, result: Verdicts, budget: BlockBudget | None = None) -> Answer:
        from reports.compare import ci, text

        document = text.outcome_blocks(result)
        markdown = render(document, "md") + "\n"
        if self.junit is not None:
            console.write_file(self.junit, ci.to_junit(result, strict=self.strict))
        if self.markdown is not None:
            console.write_file(self.markdown, markdown)
        place = os.environ.get("GITHUB_STEP_SUMMARY") if self.github else None
        if place:
            _append(Path(place), markdown)
        annotations = ci.annotation_lines(result) if self.github else []
        if self.as_json:
            for line in annotations:  # GitHub reads them on either stream, and stdout is JSON's
                console.note(line)
        code = gate_code(result, strict=self.strict)
        data = text.to_data(result) | {"exit_code": code}
        data |= {"budget": budget.to_data()} if budget else {}
        document += [Code("\n".join(annotations))] if annotations else []
        return Answer(document, data, code, self._remarks(result))

    def _remarks(self, result: Verdicts) -> tuple[str, ...]:
        remarks = []
        if result.undecided and not self.strict:
            remarks.append(
                f"warning: undecided required comparisons: {len(result.of('inconclusive'))}"
                " (--strict makes it 4)"
            )
        if result.failed and not result.judgements:
            reasons = "; ".join(f"{cell}: {why}" for cell, why in result.sides.failed[:5])
            remarks.append(f"error: nothing was measured: {reasons}")
        return tuple(remarks)

    def _of_files(self) -> Sides:
        """The runs of a file of CI, or of a log, against those of another one or a baseline."""
        from reports.compare.sides import stated_sides

        named = self.baseline or self.against
        if named is None or self.only or self.base_arm or self.head_arm:
            raise UsageError(f"{self.sweep} is a file: compare it alone, with --baseline FILE|NAME")
        is_file = Path(named).is_file()
        base = _of_file(Path(named)) if is_file else load_baseline(self.store(), named)
        head = Path(self.sweep)
        cells = baseline_of_file(head.stem, head).cells
        return stated_sides(f"baseline {base.name}", base.cells, self.sweep, cells)

    def _judged(self, store: ResultsStore, sweep: JudgedSweep, policy: Policy) -> Verdicts:
        from reports.compare import sides
        from reports.compare.judge import judge
        from reports.compare.noise import calibrations
        from sweeps.selected_sweep import sweep_file

        codes = sweep.codes
        if self.baseline is not None:
            kept = load_baseline(store, self.baseline)
            named = store, kept.name, kept.cells, sweep.id, self.head_arm
            pairs = sides.sides_of_baseline(*named, codes=codes)
        elif self.against is not None:
            both = (self.base_arm, self.head_arm)
            pairs = sides.sides_of_sweeps(store, self.against, sweep.id, arms=both, codes=codes)
        else:
            pairs = sides.sides_of_arms(store, sweep.id, self.base_arm, self.head_arm, codes)
        if self.only:
            pairs = pairs.selected(self.only)
        if sweep.runs is not None:  # a file was named: annotations can point at it
            pairs = replace(pairs, source=str(sweep_file(Path(self.sweep))))
        pairs = sweep.checked(pairs, self.head_arm, self.only)
        return judge(pairs, policy, calibrations(store), any_nodes=self.any_nodes)

    def _blocks_to_run(self, repeat: int | None = None) -> SelectedSweep:
        """The sweep with its arms in blocks, of the cells that are judged.

        Raises:
            UsageError: the sweep is named by its id, which says nothing of how to run it.
        """
        from bench.resolve.machine import Machine
        from reports.compare.sides import matching
        from sweeps.selected_sweep import SelectedSweep, find_sweep_file

        named = Path(self.sweep)
        if find_sweep_file(named) is None:
            name, value = ("--confirm", "N") if self.confirm else ("--budget", "10m")
            raise UsageError(
                f"{name} runs blocks, so it needs the sweep file and its arms, found the id"
                f" {self.sweep!r}: gate SWEEP.yaml --arm base=GITREF --arm head=. {name} {value}"
            )
        sweep = SelectedSweep.of(
            named, Machine.detect(), arms=self.arms, repeat=repeat, interleave=True
        )
        if not self.only:
            return sweep
        kept = matching([cell.id for cell in sweep.full_plan.cells], self.only)
        return replace(sweep, kept=tuple(kept))

    def _measured(self, seconds: float) -> tuple[JudgedSweep, BlockBudget]:
        """Add blocks of the arms until the time is spent."""
        from bench.cli.judged_sweep import as_it_is
        from bench.cli.run import run_within
        from bench.plan import Plan
        from reports.compare.sides import two_arms
        from sweeps.resume import RunOptions

        sweep = self._blocks_to_run()
        store = self.store(create=True)
        sweep = sweep.prepared(store, console.note)
        names = [arm.name for arm in sweep.full_plan.arms]
        two_arms(sweep.id, names, self.base_arm, self.head_arm)  # before anything runs
        _, outcome, budget = run_within(sweep, store, RunOptions(), seconds)
        if outcome.interrupted:
            raise KeyboardInterrupt
        stored = Plan.from_document(store.read_plan(sweep.id))
        return as_it_is(sweep, stored), budget

    def _confirmed(self, store: ResultsStore, judged: JudgedSweep, result: Verdicts) -> Verdicts:
        """Run `--confirm` more blocks and judge all blocks together; `result` if one is lost."""
        from bench.cli.run import outcome_code, run_to_judge
        from bench.plan import Plan

        plan = Plan.from_document(store.read_plan(judged.id))
        if not plan.interleaved:
            raise UsageError(
                f"--confirm runs more blocks, and {judged.id} was not run with --interleave"
            )
        blocks = max((cell.repeats for cell in plan.cells), default=0) + self.confirm
        sweep = self._blocks_to_run(blocks)
        cells = f"{len(sweep.chosen.cells)} of {len(sweep.full_plan.cells)} cells"
        console.note(
            f"regressed; running {self.confirm} more blocks of {cells} before it is believed"
        )
        sweep = sweep.prepared(store, console.note)
        outcome = run_to_judge(sweep, store)
        if outcome_code(sweep.chosen, outcome) != exit_codes.OK:
            console.note("not every block of these has finished, so the regression stays as it was")
            return result
        return self._judged(store, judged, result.policy)


def gate_code(result: Verdicts, *, strict: bool) -> int:
    """3 a cell without a number, 1 regressed, 5 nothing comparable, 4 undecided and strict."""
    codes = {
        "failed": exit_codes.NOTHING_MEASURED,
        "regressed": exit_codes.REQUIREMENT_NOT_MET,
        "not comparable": exit_codes.NOT_COMPARABLE,
        "undecided": exit_codes.INCONCLUSIVE if strict else exit_codes.OK,
    }
    return codes.get(result.outcome, exit_codes.OK)


def _append(path: Path, markdown: str) -> None:
    """To the step summary of GitHub Actions."""
    from reports.compare import ci

    try:
        size = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as stream:
            stream.write(ci.summary(markdown, size))
    except OSError as error:
        console.note(f"warning: the step summary {path} cannot be written: {error.strerror}")


def load_baseline(store: ResultsStore, named: str) -> Baseline:
    """A baseline by its name, or from a file of any place, ours or another project's.

    Raises:
        UsageError: there is none, or it is damaged.
        NotComparableError: it has another schema.
        NothingMeasuredError: a file without a run.
    """
    from reports.compare.baseline import read_baseline

    path = Path(named)
    if named in store.baselines.names() or not (path.is_file() or path.suffix == ".json"):
        return read_baseline(store.baselines.read(named), f"baseline {named}")
    return _of_file(path)


def _of_file(path: Path) -> Baseline:
    from bench.store.documents import read_document
    from reports.compare.baseline import read_baseline

    if not path.is_file() or _BASELINE in path.read_bytes()[:_HEAD_BYTES]:
        return read_baseline(read_document(path, "baseline"), str(path))
    return baseline_of_file(path.stem, path)


def baseline_of_file(name: str, path: Path) -> Baseline:
    """Of a file of CI, or of any log, that `import` reads.

    Raises:
        UsageError: it cannot be read.
        NothingMeasuredError: it holds no run.
    """
    from bench.importers.labels import as_name
    from bench.store.run_folder import utc_now
    from reports.compare.baseline import make_baseline
    from reports.compare.samples import imported_samples

    cells = [imported_samples(run) for run in runs_of_log(str(path))]
    return make_baseline(name, as_name(path.stem) or "file", utc_now(), cells)
