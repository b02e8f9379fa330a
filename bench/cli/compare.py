"""`compare`: verdicts of the gate without its exit code, and logs whose numbers get none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from bench.cli import exit_codes
from bench.cli.completion import offer_any
from bench.cli.import_ import doubts_of, is_log, runs_of_log
from bench.cli.verb import Answer, ArmsOption, PolicyOption, ResultsOption, argument, option
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from reports.renderers import markdown
from reports.renderers.document import Block, Bullets, Heading, Paragraph, TableBlock

if TYPE_CHECKING:
    from bench.cli.judged_sweep import JudgedSweep
    from bench.store import ResultsStore
    from bench.workload import ImportedRun
    from reports.compare.judge import Verdicts
    from reports.compare.logs import Beside, Shown
    from reports.compare.policy import Policy
    from reports.compare.sides import Sides
    from reports.posts.pairs import Pair

_MOST_REASONS = 5


class CompareVerb(
    PolicyOption,
    ArmsOption,
    ResultsOption,
    name="compare",
    examples=(
        "compare quickstart:ddp-fp32 quickstart:mfsdp-optim-fp32",
        "compare speed --format md",
        "compare base.log head.log",
    ),
):
    """Compare two sweeps, cells, runs or logs, or arms of a sweep.

    A cell is written SWEEP:CELL. Of a sweep file, what is asked for now must be what was
    measured: 3 if nothing was, 5 if an arm was other code.
    """

    base: str = argument(
        "BASE", "A sweep, cell or log to compare with, or a sweep file.", offer=offer_any
    )
    head: str | None = argument(
        "HEAD", "The sweep, cell or log to judge; left out: arms or runs of BASE.", None, offer_any
    )
    ignore: tuple[str, ...] = option("--ignore PATH", "A setting or section to set aside.", ())
    form: Literal["table", "md", "refresh"] = option(
        "--format", "How to print; refresh: per metric of two imports, for golden values.", "table"
    )

    def run(self) -> Answer:
        """A comparison; of the arms of the base where there is no head."""
        if any(map(is_log, filter(None, (self.base, self.head)))):
            return self._of_logs()
        rules, store = self.rules(), self.store()
        if self.head is None:
            return self._of_arms(store, rules)
        if self.arms:
            raise UsageError("--arm compares the arms of one sweep file; leave HEAD out")
        base, head = (_called(store, name) for name in (self.base, self.head))
        logs = {base, head} & {*store.imports.ids()}
        if self.form == "refresh":
            if len(logs) < len({base, head}):
                raise UsageError(
                    "--format refresh compares two imported runs; export --format golden writes a"
                    " measured one, which import reads"
                )
            return _refresh(store.imports.read(base), store.imports.read(head))
        if logs:
            for name, given in (("--ignore", self.ignore), ("--policy", self.policy)):
                if given:
                    raise UsageError(
                        f"{name} is for verdicts, and beside the imported run {min(logs)} there"
                        " are none; leave it out"
                    )
            return _side_by_side([_shown_of(store, name) for name in (base, head)])
        return self._of_sweeps(store, base, head, rules)

    def _of_sweeps(self, store: ResultsStore, base: str, head: str, policy: Policy) -> Answer:
        from reports.compare import text
        from reports.compare.judge import judge
        from reports.compare.noise import calibrations
        from reports.compare.sides import sides_of_sweeps
        from reports.views.no_number import NOT_RUN, why_not_finished
        from reports.views.sweep_view import load_side

        sides = sides_of_sweeps(store, base, head, self.ignore)
        judged = judge(sides, policy, calibrations(store), any_nodes=True)
        if not judged.nothing_comparable:
            return Answer(text.verdict_blocks(judged), {"verdicts": text.to_data(judged)})
        for name in (base, head):
            cells = load_side(store, name)
            if not any(cell.finished for cell in cells):
                ends = [(cell.name, why_not_finished(cell)) for cell in cells] or [(name, NOT_RUN)]
                raise NothingMeasuredError(f"{name} has no finished run: {_reasons(ends)}")
        advice = "name the settings to set aside with --ignore, or compare single cells"
        raise _not_comparable(sides, judged, advice)

    def _of_arms(self, store: ResultsStore, policy: Policy) -> Answer:
        """Every other arm with the base; in JSON those behind the first pair are `further_arms`."""
        from bench.cli.judged_sweep import judged_sweep
        from reports.compare import text
        from reports.compare.sides import arms_of_sweep, planned_arms

        if self.form == "refresh":
            raise UsageError("--format refresh compares two imported runs; name HEAD")
        if self.ignore:
            raise UsageError(
                "--ignore sets settings aside where cells of two sides are matched; name HEAD, or"
                " leave --ignore out"
            )
        sweep = judged_sweep(store, self.base, self.arms)
        base, head = arms_of_sweep(store, sweep.id, None, None)
        others = [arm for arm in planned_arms(store, sweep.id) if arm not in (base, head)]
        judged: list[Verdicts] = []
        refused: dict[str, NothingMeasuredError | NotComparableError] = {}
        for arm in (head, *others):
            try:
                judged.append(_of_two_arms(store, sweep, (base, arm), policy))
            except (NothingMeasuredError, NotComparableError) as error:
                refused[arm] = error
        if not judged:
            raise refused[head]
        document = [block for one in judged for block in text.verdict_blocks(one)]
        document += [Paragraph(f"arm {arm} is not compared: {why}") for arm, why in refused.items()]
        data, *further = map(text.to_data, judged)
        data |= {"further_arms": further} if further else {}
        if refused:
            data["arms_not_compared"] = {arm: str(error) for arm, error in refused.items()}
        return Answer(document, data)

    def _of_logs(self) -> Answer:
        """Logs side by side or with a kept run; of one log, its runs by their labels."""
        from reports.compare.logs import of_import
        from reports.posts.pairs import pairs

        for name, given in (("--ignore", self.ignore), ("--policy", self.policy)):
            if given or self.arms:
                raise UsageError(f"{name if given else '--arm'} is for sweeps, and a log is named")
        sides = []
        for name in filter(None, (self.base, self.head)):
            if is_log(name):
                sides.append([of_import(run) for run in runs_of_log(name)])
            else:
                store = self.store()
                sides.append(_shown_of(store, _called(store, name)))
        if self.head is None:
            first, *others = sides[0]
            if not others:
                raise UsageError(f"{self.base} holds one run; name HEAD to compare it with")
            compared = list(pairs(sides[0], alike=False)) or [(first, one) for one in others]
            return _side_by_side(sides, compared)
        if self.form == "refresh":
            two = [side[0].run for side in sides if len(side) == 1]
            if len(two) != len(sides) or two[0] is None or two[1] is None:
                raise UsageError("--format refresh compares two runs; name logs of one run each")
            return _refresh(two[0], two[1])
        return _side_by_side(sides)


def _not_comparable(sides: Sides, judged: Verdicts, advice: str) -> NotComparableError:
    """Of two sides with finished runs: why the gate refused their pairs, or that none matches."""
    from reports.compare import text

    if unlike := [one for pair in sides.pairs for one in pair.unlike]:
        sections = dict.fromkeys(one.section for one in unlike)
        rates = "".join(f"\n{cell}: {rate}" for cell, rate in judged.rates)
        return NotComparableError(
            f"{text.headline(judged)}; to compare all the same:"
            f" {' '.join(f'--ignore {one}' for one in sections)}{rates}"
        )
    found = judged.sides.not_comparable
    refused = [one for one in found if one not in sides.not_comparable]
    return NotComparableError(
        f"nothing in {sides.base} and {sides.head} can be compared:"
        f" {_reasons(refused or [*found, *sides.failed])}; {advice}"
    )


def _reasons(found: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{cell}: {why}" for cell, why in found[:_MOST_REASONS])


def _called(store: ResultsStore, name: str) -> str:
    """The only sweep of this name, where its arms are left out of it; else the name itself."""
    found = store.sweeps_called(name)
    return found[0] if len(found) == 1 else name


def _of_two_arms(
    store: ResultsStore, sweep: JudgedSweep, arms: tuple[str, str], policy: Policy
) -> Verdicts:
    from reports.compare.judge import judge
    from reports.compare.noise import calibrations
    from reports.compare.sides import checked, sides_of_arms

    expected = sweep.expected
    sides = sides_of_arms(store, sweep.id, *arms, None if expected is None else expected.codes)
    if expected is not None:
        sides = checked(sides, expected, arms)
    if not sides.pairs:
        raise NothingMeasuredError(f"{sweep.id} has nothing to compare: {_reasons(sides.failed)}")
    judged = judge(sides, policy, calibrations(store), any_nodes=True)
    if judged.nothing_comparable:
        raise _not_comparable(sides, judged, "run the arms on one kind of hardware")
    return judged


def _refresh(base: ImportedRun, head: ImportedRun) -> Answer:
    from reports.compare.logs import refresh_table, refreshed

    found = refreshed(base, head)
    if not found:
        raise NothingMeasuredError(f"{base.id} and {head.id} have no metric at a step of both")
    metrics = [vars(one) | {"flag": one.flag} for one in found]
    return Answer(
        f"{base.id} -> {head.id}\n\n{markdown.table(refresh_table(found))}",
        {"base": base.id, "head": head.id, "metrics": metrics},
    )


def _shown_of(store: ResultsStore, name: str) -> list[Shown]:
    from reports.compare.logs import of_cell, of_import
    from reports.views.sweep_view import load_side

    if name in store.imports.ids():
        return [of_import(store.imports.read(name))]
    return [of_cell(cell) for cell in load_side(store, name) if cell.finished]


def _side_by_side(
    sides: Sequence[Sequence[Shown]], compared: Sequence[Pair] | None = None
) -> Answer:
    """Runs of which one at least is imported: their numbers, and no verdict.

    compared: which with which; every one of the first side with every one of the other.
    """
    from bench.resolve.presets import PRESETS
    from reports.compare.logs import beside, flops_doubt, to_data
    from reports.compare.unlike import text_of

    shown = [one for side in sides for one in side]
    pairs = [beside(*pair) for pair in compared or itertools.product(*sides)]
    headline = ""
    if pairs and all(pair.unlike for pair in pairs):
        headline = f"not comparable: {text_of(one for pair in pairs for one in pair.unlike)}"
    implied = [found for one in shown if one.run and (found := flops_doubt(one, PRESETS))]
    data: dict[str, Any] = {"side_by_side": to_data(shown), "verdicts": None}
    data |= {"outcome": headline} if headline else {}
    data |= {"flops": implied} if implied else {}
    if all(one.run is not None for one in shown):
        data["parity"], *further = (pair.to_data() for pair in pairs)
        data |= {"further": further} if further else {}
    document: list[Block] = [Paragraph(headline)] if headline else []
    document += _tables(shown, pairs)
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


def _tables(shown: Sequence[Shown], pairs: Sequence[Beside]) -> list[Block]:
    """All runs, then the steps and numbers that differ in each pair."""
    from reports.compare import logs

    blocks: list[Block] = [TableBlock(logs.side_by_side(shown), logs.CAPTION)]
    telling = [pair for pair in pairs if pair.changes or pair.differences or pair.doubts]
    for pair in telling:
        tables = (logs.differences_table(pair.differences), logs.changes_table(pair.changes))
        blocks += [Heading(f"{pair.head} against {pair.base}")] if len(telling) > 1 else []
        blocks += [TableBlock(table) for table in tables if table.rows]
    if all(one.run is not None for one in shown):
        blocks.append(Paragraph(logs.STEPS_CAPTION))
    return blocks
