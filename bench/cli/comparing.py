"""`compare`: the command line in front of `reports.compare` and the verdicts of the gate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.cli import exit_codes
from bench.cli.console import Answer
from bench.cli.importing import doubts_of, is_log, runs_of_log
from bench.cli.judged_sweep import JudgedSweep, judged_sweep, read_policy
from bench.cli.verbs.judge import CompareRequest
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.resolve.presets import PRESETS
from bench.store import ResultsStore
from bench.workload import ImportedRun
from reports.compare import logs as imported
from reports.compare import text as gate_text
from reports.compare.judge import Verdicts, judge
from reports.compare.logs import flops_doubt, refresh_table, refreshed
from reports.compare.noise import calibrations
from reports.compare.policy import Policy
from reports.compare.sides import (
    Sides,
    arms_of_sweep,
    checked,
    planned_arms,
    sides_of_arms,
    sides_of_sweeps,
)
from reports.compare.unlike import text_of
from reports.posts.pairs import Pair
from reports.posts.pairs import pairs as pairs_of
from reports.renderers import markdown, terminal
from reports.renderers.document import Block, Bullets, Heading, Paragraph, TableBlock
from reports.views.no_number import NOT_RUN, why_not_finished
from reports.views.sweep_view import load_side

_WRITERS: dict[str, Callable[[Iterable[Block]], str]] = {
    "table": terminal.blocks,
    "md": markdown.blocks,
}
_MOST_REASONS = 5


def show_comparison(request: CompareRequest) -> Answer:
    """A comparison; of the arms of the base where there is no head.

    Raises:
        UsageError: an unknown name, or an option that would do nothing.
        NothingMeasuredError: a side has no finished run.
        NotComparableError: nothing of the two sides can be compared.
    """
    is_of_logs = any(map(is_log, filter(None, (request.base, request.head))))
    return _of_logs(request) if is_of_logs else _of_kept(request)


def _of_kept(request: CompareRequest) -> Answer:
    rules, form = read_policy(request.policy), request.form
    store = ResultsStore.open(request.results, create=False)
    if request.head is None:
        if form == "refresh":
            raise UsageError("--format refresh compares two imported runs; name HEAD")
        if request.ignore:
            raise UsageError(
                "--ignore sets settings aside where cells of two sides are matched; name HEAD, or"
                " leave --ignore out"
            )
        return _of_arms(store, judged_sweep(store, request.base, request.arms), rules, form)
    if request.arms:
        raise UsageError("--arm compares the arms of one sweep file; leave HEAD out")
    base, head = (_called(store, name) for name in (request.base, request.head))
    logs = {base, head} & {*store.imports.ids()}
    if form == "refresh":
        return _refreshed(store, base, head, logs)
    if logs:
        for option, given in (("--ignore", request.ignore), ("--policy", request.policy)):
            if given:
                raise UsageError(
                    f"{option} is for verdicts, and beside the imported run {min(logs)} there"
                    " are none; leave it out"
                )
        return _beside([_shown_of(store, name) for name in (base, head)], form)
    sides = sides_of_sweeps(store, base, head, request.ignore)
    judged = judge(sides, rules, calibrations(store), any_nodes=True)
    if judged.nothing_comparable:
        _refuse_unfinished(store, base, head)
        advice = "name the settings to set aside with --ignore, or compare single cells"
        raise _not_comparable(sides, judged, advice)
    return Answer(
        lambda: {"verdicts": gate_text.to_data(judged)},
        lambda: gate_text.verdicts(judged, form=form),
    )


def _refuse_unfinished(store: ResultsStore, *names: str) -> None:
    """Raise where a side has no finished run, with what became of its runs."""
    for name in names:
        cells = load_side(store, name)
        if not any(cell.finished for cell in cells):
            ends = [(cell.name, why_not_finished(cell)) for cell in cells] or [(name, NOT_RUN)]
            raise NothingMeasuredError(f"{name} has no finished run: {_reasons(ends)}")


def _not_comparable(sides: Sides, judged: Verdicts, advice: str) -> NotComparableError:
    """Of two sides with finished runs: why the gate refused their pairs, or that none matches."""
    if unlike := [one for pair in sides.pairs for one in pair.unlike]:
        sections = dict.fromkeys(one.section for one in unlike)
        rates = "".join(f"\n{cell}: {rate}" for cell, rate in judged.rates)
        return NotComparableError(
            f"{gate_text.headline(judged)}; to compare all the same:"
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
    """The only sweep of this name, where its arms are left out of it; else the name as it is."""
    found = store.sweeps_called(name)
    return found[0] if len(found) == 1 else name


def _refreshed(store: ResultsStore, base: str, head: str, logs: set[str]) -> Answer:
    if len(logs) < len({base, head}):
        raise UsageError(
            "--format refresh compares two imported runs; export --format golden writes a measured"
            " one, which import reads"
        )
    return _refresh(store.imports.read(base), store.imports.read(head))


def _refresh(base_run: ImportedRun, head_run: ImportedRun) -> Answer:
    base, head = base_run.id, head_run.id
    found = refreshed(base_run, head_run)
    if not found:
        raise NothingMeasuredError(f"{base} and {head} have no metric at a step of both")
    return Answer(
        lambda: {
            "base": base,
            "head": head,
            "metrics": [vars(one) | {"flag": one.flag} for one in found],
        },
        lambda: f"{base} -> {head}\n\n{markdown.table(refresh_table(found))}",
    )


def _of_logs(request: CompareRequest) -> Answer:
    """Logs beside each other or beside a kept run; of one log, its runs by their labels."""
    for option, given in (("--ignore", request.ignore), ("--policy", request.policy)):
        if given or request.arms:
            raise UsageError(f"{option if given else '--arm'} is for sweeps, and a log is named")
    sides = []
    for name in filter(None, (request.base, request.head)):
        if is_log(name):
            sides.append([imported.of_import(run) for run in runs_of_log(name)])
        else:
            store = ResultsStore.open(request.results, create=False)
            sides.append(_shown_of(store, _called(store, name)))
    if request.head is None:
        first, *others = sides[0]
        if not others:
            raise UsageError(f"{request.base} holds one run; name HEAD to compare it with")
        compared = list(pairs_of(sides[0], alike=False)) or [(first, one) for one in others]
        return _beside(sides, request.form, compared)
    if request.form == "refresh":
        two = [side[0].run for side in sides if len(side) == 1]
        if len(two) != len(sides) or two[0] is None or two[1] is None:
            raise UsageError("--format refresh compares two runs; name logs of one run each")
        return _refresh(two[0], two[1])
    return _beside(sides, request.form)


def _beside(
    sides: Sequence[Sequence[imported.Shown]], form: str, compared: Sequence[Pair] | None = None
) -> Answer:
    """Runs of which one at least is imported: numbers beside each other, and no verdict.

    compared: which with which; every one of the first side with every one of the other.
    """
    shown = [one for side in sides for one in side]
    both = compared or [(base, head) for base, head in itertools.product(*sides)]
    pairs = [imported.beside(*pair) for pair in both]
    refused = bool(pairs) and all(pair.unlike for pair in pairs)
    logs = [pair for pair in pairs if pair.changes or pair.differences or pair.doubts]
    two = all(one.run is not None for one in shown)
    implied = [found for one in shown if one.run and (found := flops_doubt(one, PRESETS))]

    def document() -> dict[str, Any]:
        data: dict[str, Any] = {"side_by_side": imported.to_data(shown), "verdicts": None}
        if refused:
            data["outcome"] = _unlike_headline(pairs)
        if implied:
            data["flops"] = implied
        if two:
            data["parity"], *further = (pair.to_data() for pair in pairs)
            data |= {"further": further} if further else {}
        return data

    def text() -> str:
        blocks: list[Block] = [Paragraph(_unlike_headline(pairs))] if refused else []
        blocks.append(TableBlock(imported.side_by_side(shown), imported.CAPTION))
        for pair in logs:
            tables = (
                imported.differences_table(pair.differences),
                imported.changes_table(pair.changes),
            )
            blocks += [Heading(f"{pair.head} against {pair.base}")] if len(logs) > 1 else []
            blocks += [TableBlock(table) for table in tables if table.rows]
        blocks += [Paragraph(imported.STEPS_CAPTION)] if two else []
        told = [
            f"{pair.base} and {pair.head} are not comparable: {text_of(pair.unlike)}"
            for pair in pairs
            if pair.unlike and not refused
        ]
        told += [
            f"{pair.head} against {pair.base}: {doubt}" if len(pairs) > 1 else doubt
            for pair in pairs
            for doubt in pair.doubts
        ]
        told += [*implied, *doubts_of(shown)]
        blocks += [Bullets(tuple(("", text) for text in told))] if told else []
        return _WRITERS[form](blocks)

    return Answer(document, text, exit_codes.NOT_COMPARABLE if refused else exit_codes.OK)


def _shown_of(store: ResultsStore, name: str) -> list[imported.Shown]:
    if name in store.imports.ids():
        return [imported.of_import(store.imports.read(name))]
    return [imported.of_cell(cell) for cell in load_side(store, name) if cell.finished]


def _unlike_headline(pairs: Sequence[imported.Beside]) -> str:
    return f"not comparable: {text_of(one for pair in pairs for one in pair.unlike)}"


def _of_arms(store: ResultsStore, named: JudgedSweep, policy: Policy, form: str) -> Answer:
    """Every other arm beside the base; in JSON those behind the first pair are `further_arms`."""
    sweep = named.id
    base, head = arms_of_sweep(store, sweep, None, None)
    others = [arm for arm in planned_arms(store, sweep) if arm not in (base, head)]
    judged: list[Verdicts] = []
    refused: dict[str, NothingMeasuredError | NotComparableError] = {}
    for arm in (head, *others):
        try:
            judged.append(_of_two_arms(store, named, (base, arm), policy))
        except (NothingMeasuredError, NotComparableError) as error:
            refused[arm] = error
    if not judged:
        raise refused[head]

    def document() -> dict[str, Any]:
        first, *further = (gate_text.to_data(one) for one in judged)
        told: dict[str, Any] = {"further_arms": further} if further else {}
        if refused:
            told["arms_not_compared"] = {arm: str(error) for arm, error in refused.items()}
        return first | told

    def text() -> str:
        verdicts = "\n".join(gate_text.verdicts(one, form=form) for one in judged)
        for arm, error in refused.items():
            verdicts += f"\narm {arm} is not compared: {error}\n"
        return verdicts

    return Answer(document, text)


def _of_two_arms(
    store: ResultsStore, named: JudgedSweep, arms: tuple[str, str], policy: Policy
) -> Verdicts:
    expected = named.expected
    sides = sides_of_arms(store, named.id, *arms, None if expected is None else expected.codes)
    if expected is not None:
        sides = checked(sides, expected, arms)
    if not sides.pairs:
        raise NothingMeasuredError(f"{named.id} has nothing to compare: {_reasons(sides.failed)}")
    judged = judge(sides, policy, calibrations(store), any_nodes=True)
    if judged.nothing_comparable:
        raise _not_comparable(sides, judged, "run the arms on one kind of hardware")
    return judged
