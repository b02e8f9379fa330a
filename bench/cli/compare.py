"""`compare`: verdicts of the gate without its exit code, and logs whose numbers get none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from bench.cli import exit_codes
from bench.cli.import_ import doubts_of, is_log, runs_of_log
from bench.cli.verb import Answer, ArmsOption, PolicyOption, ResultsOption, argument, option
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from reports.renderers.document import Block, Bullets, Heading, Paragraph, TableBlock

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from bench.workload import ImportedRun
    from reports.compare.judge import Verdicts
    from reports.compare.logs import Shown
    from reports.compare.policy import Policy
    from reports.compare.sides import JudgedSweep, Sides
    from reports.posts.pairs import Pair

_MOST_REASONS = 5


class CompareVerb(PolicyOption, ArmsOption, ResultsOption, name="compare"):
    """Compare two sweeps, cells, runs or logs, or arms of a sweep.

    A cell is written SWEEP:CELL. Of a sweep file, what is requested now must be what was
    measured: 3 if nothing was, 5 if an arm was other code.

    Examples:
        compare quickstart:ddp-fp32 quickstart:mfsdp-optim-fp32
        compare speed --format md
        compare base.log head.log
    """

    base: str = argument("BASE", "A sweep, cell or log to compare with, or a sweep file.")
    head: str | None = argument(
        "HEAD", "The sweep, cell or log to judge; left out: arms or runs of BASE.", None
    )
    ignore: tuple[str, ...] = option("--ignore PATH", "A setting or section to set aside.", ())
    form: Literal["table", "md", "refresh"] = option(
        "--format", "How to print; refresh: per metric of two imports, for golden values.", "table"
    )

    def run(self) -> Answer:
        """A comparison; of the arms of the base where there is no head."""
        names = [name for name in (self.base, self.head) if name is not None]
        judging = ["--ignore"] * bool(self.ignore) + ["--policy"] * (self.policy is not None)
        if is_of_logs := any(map(is_log, names)):
            if refused := [*judging, *["--arm"] * bool(self.arms)]:
                raise UsageError(f"{refused[0]} is for sweeps, and a log is named")
        elif self.arms and self.head is not None:
            raise UsageError("--arm compares the arms of one sweep file; leave HEAD out")
        if self.form == "refresh":
            return self._refresh(names)
        if is_of_logs:
            return self._of_logs([self._shown(name) for name in names])
        policy, store = self.rules(), self.store()
        if self.head is None:
            return self._of_arms(store, policy)
        base, head = (store.only_called(name) for name in names)
        if not (logs := {base, head} & {*store.imports.ids()}):
            return self._of_sweeps(store, base, head, policy)
        if judging:
            raise UsageError(
                f"{judging[0]} is for verdicts, and next to the imported run {min(logs)} there"
                " are none; leave it out"
            )
        return _side_by_side([self._shown(base), self._shown(head)])

    def _of_sweeps(self, store: ResultsStore, base: str, head: str, policy: Policy) -> Answer:
        from reports.compare import text
        from reports.compare.sides import sides_of_sweeps
        from reports.views.no_number import NOT_RUN, why_not_finished
        from reports.views.sweep_view import load_side

        pairs = sides_of_sweeps(store, base, head, self.ignore)
        verdicts = _judged(store, pairs, policy)
        if not verdicts.nothing_comparable:
            return Answer(text.verdict_blocks(verdicts), {"verdicts": text.to_data(verdicts)})
        for name in (base, head):
            cells = load_side(store, name)
            if not any(cell.finished for cell in cells):
                ends = [(cell.name, why_not_finished(cell)) for cell in cells] or [(name, NOT_RUN)]
                raise NothingMeasuredError(f"{name} has no finished run: {_reasons(ends)}")
        advice = "name the settings to set aside with --ignore, or compare single cells"
        raise _not_comparable(pairs, verdicts, advice)

    def _of_arms(self, store: ResultsStore, policy: Policy) -> Answer:
        """Every other arm with the base; in JSON those behind the first pair are `further_arms`."""
        from bench.cli.judged_sweep import judged_sweep
        from reports.compare import text
        from reports.compare.sides import arms_of_sweep
        from reports.views.sweep_view import plan_of

        if self.ignore:
            raise UsageError(
                "--ignore sets settings aside where cells of two sides are matched; name HEAD, or"
                " leave --ignore out"
            )
        sweep = judged_sweep(store, self.base, self.arms)
        base, head = arms_of_sweep(store, sweep.id, None, None)
        others = [arm for arm in plan_of(store, sweep.id).arm_names if arm not in (base, head)]
        judged: list[Verdicts] = []
        refused: dict[str, NothingMeasuredError | NotComparableError] = {}
        for arm in (head, *others):
            try:
                judged.append(_of_two_arms(store, sweep, (base, arm), policy))
            except (NothingMeasuredError, NotComparableError) as error:
                refused[arm] = error
        if not judged:
            raise refused[head]
        document = [block for verdicts in judged for block in text.verdict_blocks(verdicts)]
        document += [Paragraph(f"arm {arm} is not compared: {why}") for arm, why in refused.items()]
        data, *further = map(text.to_data, judged)
        data |= {"further_arms": further} if further else {}
        if refused:
            data["arms_not_compared"] = {arm: str(error) for arm, error in refused.items()}
        return Answer(document, data)

    def _of_logs(self, shown: Sequence[Sequence[Shown]]) -> Answer:
        """Logs side by side or with a kept run; of one log, its runs by their labels."""
        from reports.posts.pairs import pairs

        if self.head is not None:
            return _side_by_side(shown)
        if not (compared := list(pairs(shown[0], alike=False))):
            count = "one run" if len(shown[0]) == 1 else "no two runs of one row, or with steps"
            raise UsageError(f"{self.base} holds {count}; name HEAD to compare it with")
        return _side_by_side(shown, compared)

    def _shown(self, name: str) -> list[Shown]:
        """The runs of a log, the imported run or the finished cells of this name."""
        from reports.compare.logs import of_cell, of_import
        from reports.views.sweep_view import load_side

        if is_log(name):
            return [of_import(run) for run in runs_of_log(name)]
        store = self.store()
        name = store.only_called(name)
        if name in store.imports.ids():
            return [of_import(store.imports.read(name))]
        return [of_cell(cell) for cell in load_side(store, name) if cell.finished]

    def _refresh(self, names: Sequence[str]) -> Answer:
        """Per metric of two imported runs, kept or in logs of one run each."""
        from reports.compare.logs import REFRESH_CAPTION, refresh_table, refreshed

        if self.head is None:
            raise UsageError("--format refresh compares two imported runs; name HEAD")
        runs = [run for name in names for run in self._imported(name)]
        if len(runs) > len(names):
            raise UsageError("--format refresh compares two runs; name logs of one run each")
        base, head = runs
        changes = refreshed(base, head)
        if not changes:
            raise NothingMeasuredError(f"{base.id} and {head.id} have no metric at a step of both")
        metrics = [change.to_data() for change in changes]
        document: list[Block] = [
            Paragraph(f"{head.id} (head) against {base.id} (base)"),
            TableBlock(refresh_table(changes), REFRESH_CAPTION),
            Bullets(tuple((run.id, text) for run in runs for text in run.provenance.remarks)),
        ]
        return Answer(document, {"base": base.id, "head": head.id, "metrics": metrics})

    def _imported(self, name: str) -> list[ImportedRun]:
        if is_log(name):
            return runs_of_log(name)
        imports = self.store().imports
        if name not in imports.ids():
            raise UsageError(
                "--format refresh compares two imported runs; export --format golden writes a"
                " measured one, which import reads"
            )
        return [imports.read(name)]


def _judged(store: ResultsStore, pairs: Sides, policy: Policy) -> Verdicts:
    from reports.compare.judge import judge
    from reports.compare.noise import calibrations

    return judge(pairs, policy, calibrations(store), any_nodes=True)


def _of_two_arms(
    store: ResultsStore, sweep: JudgedSweep, arms: tuple[str, str], policy: Policy
) -> Verdicts:
    from reports.compare.sides import sides_of_arms

    pairs = sweep.checked(sides_of_arms(store, sweep.id, *arms, sweep.codes))
    if not pairs.pairs:
        raise NothingMeasuredError(f"{sweep.id} has nothing to compare: {_reasons(pairs.failed)}")
    verdicts = _judged(store, pairs, policy)
    if verdicts.nothing_comparable:
        raise _not_comparable(pairs, verdicts, "run the arms on one kind of hardware")
    return verdicts


def _not_comparable(pairs: Sides, verdicts: Verdicts, advice: str) -> NotComparableError:
    """Of two sides with finished runs: why the gate refused their pairs, or that none matches."""
    from reports.compare import text

    if unlike := [reason for pair in pairs.pairs for reason in pair.unlike]:
        sections = dict.fromkeys(reason.section for reason in unlike)
        rates = "".join(f"\n{cell}: {rate}" for cell, rate in verdicts.rates)
        return NotComparableError(
            f"{text.headline(verdicts)}; to compare all the same:"
            f" {' '.join(f'--ignore {section}' for section in sections)}{rates}"
        )
    reasons = verdicts.sides.not_comparable
    refused = [reason for reason in reasons if reason not in pairs.not_comparable]
    return NotComparableError(
        f"nothing in {pairs.base} and {pairs.head} can be compared:"
        f" {_reasons(refused or [*reasons, *pairs.failed])}; {advice}"
    )


def _reasons(reasons: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{cell}: {why}" for cell, why in reasons[:_MOST_REASONS])


def _bases(compared: Sequence[Pair], shown: Sequence[Shown]) -> list[str]:
    """Which runs of one text the others are compared with, and why: a line a reason."""
    from reports.posts.pairs import why_base
    from reports.renderers import quantity

    names: dict[str, dict[str, None]] = {}
    for pair in compared:
        names.setdefault(why_base(pair, shown), {})[pair[0].name] = None
    return [f"base: {quantity.few([*own], 3, ', ')} ({why})" for why, own in names.items()]


def _side_by_side(
    by_side: Sequence[Sequence[Shown]], compared: Sequence[Pair] | None = None
) -> Answer:
    """Runs of which one at least is imported: their numbers, and no verdict.

    compared: which with which; every one of the first side with every one of the other.
    """
    from bench.resolve.presets import PRESETS
    from reports.compare import logs
    from reports.compare.unlike import text_of

    shown = [run for side in by_side for run in side]
    pairs = [logs.beside(*pair) for pair in compared or itertools.product(*by_side)]
    headline = ""
    if pairs and all(pair.unlike for pair in pairs):
        headline = f"not comparable: {text_of(why for pair in pairs for why in pair.unlike)}"
    outcomes = [headline] if headline else []
    outcomes += [text for pair in pairs for text in pair.divergences]
    bases = _bases(compared or (), shown)
    implied = [doubt for run in shown if run.run and (doubt := logs.flops_doubt(run, PRESETS))]
    data: dict[str, Any] = {"side_by_side": logs.to_data(shown), "verdicts": None}
    data |= {"outcome": "; ".join(outcomes)} if outcomes else {}
    data |= {"flops": implied} if implied else {}
    data |= {"bases": bases} if bases else {}
    document: list[Block] = [Paragraph(text) for text in (*outcomes, *bases)]
    document.append(TableBlock(logs.side_by_side(shown), logs.CAPTION))
    telling = [pair for pair in pairs if pair.changes or pair.differences or pair.doubts]
    for pair in telling:
        tables = (logs.differences_table(pair.differences), logs.changes_table(pair.changes))
        document += [Heading(f"{pair.head} against {pair.base}")] if len(telling) > 1 else []
        document += [TableBlock(table) for table in tables if table.rows]
    if all(run.run is not None for run in shown):
        data["parity"], *further = (pair.to_data() for pair in pairs)
        data |= {"further": further} if further else {}
        document.append(Paragraph(logs.STEPS_CAPTION))
    remarks = [
        f"{pair.base} and {pair.head} are not comparable: {text_of(pair.unlike)}"
        for pair in pairs
        if pair.unlike and not headline
    ]
    remarks += [
        f"{pair.head} against {pair.base}: {doubt}" if len(pairs) > 1 else doubt
        for pair in pairs
        for doubt in pair.doubts
    ]
    remarks += [*implied, *doubts_of(shown)]
    document += [Bullets(tuple(("", text) for text in remarks))] if remarks else []
    return Answer(document, data, exit_codes.NOT_COMPARABLE if headline else exit_codes.OK)
