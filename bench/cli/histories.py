"""`history`: the command line in front of `reports.history`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cli import console
from bench.cli.console import Answer
from bench.cli.judged_sweep import read_policy
from bench.cli.verbs.read import HistoryRequest
from bench.derive.metrics import judged_metrics
from bench.errors import NothingMeasuredError, UsageError
from bench.store import ResultsStore
from reports.build import HTML_NAME, write_document
from reports.gates.noise import NoiseCalibration
from reports.history.change_points import levels
from reports.history.page import History, document, overview_table, points_table, remarks, to_data
from reports.history.series import Series, series_of
from reports.history.starts import Start, each_once, read_archive, starts_of, to_lines
from reports.renderers import terminal
from sweeps.suggest import did_you_mean

_NEWEST = 20
Floor = Callable[[Series], float]


def show_history(asked: HistoryRequest) -> Answer:
    """Write the page, and say the tables.

    Raises:
        UsageError: no such metric, archive or policy, or a folder that cannot be written.
        NothingMeasuredError: no start has the metric.
    """
    known = judged_metrics()
    if asked.metric not in known:
        raise UsageError(
            f"METRIC: expected one of {', '.join(known)}, found {asked.metric!r}"
            f"{did_you_mean(asked.metric, known)}"
        )
    metric = known[asked.metric]
    starts, problems, floor = _gathered(asked.results, asked.archives, asked.append)
    found = series_of(starts, metric)
    if not found:
        raise NothingMeasuredError(f"no finished run of {asked.results} has {metric.name}")
    policy = read_policy(asked.policy)
    history = History(
        metric.name,
        tuple(
            (one, levels(one, policy.rules[one.metric.name], alpha=policy.alpha, floor=floor(one)))
            for one in found
        ),
        tuple(problems),
    )
    for problem in problems:
        console.note(f"warning: {problem}")
    out = asked.out or asked.results / "reports" / f"history-{metric.name}"
    page = str(write_document(document(history), out)[0] / HTML_NAME)
    return Answer(lambda: to_data(history) | {"html": page}, lambda: f"{_text(history)}\n{page}")


def _gathered(
    results: Path, archives: Sequence[Path], append: Path | None
) -> tuple[list[Start], list[str], Floor]:
    """Starts of all sources, what is left out, and the noise floors of the results folder."""
    store = None
    if results.exists() or not (archives or append):
        store = ResultsStore.open(results, create=False)
    starts, problems = starts_of(store) if store else ([], [])
    if append is not None:
        kept, wrong = read_archive(append) if append.exists() else ([], [])
        problems += wrong
        # A log of another night may be imported under the same name into a fresh folder.
        before = {(start.id, start.utc) for start in kept}
        new = [start for start in each_once(starts) if (start.id, start.utc) not in before]
        console.append_to_file(append, "".join(to_lines(new)))
        console.note(f"{append}: {len(new)} starts added to {len(kept)}")
        starts = kept + starts
    for path in archives:
        more, wrong = read_archive(path)
        starts, problems = starts + more, problems + wrong
    return starts, problems, _floors(store)


def _floors(store: ResultsStore | None) -> Floor:
    def floor(series: Series) -> float:
        kept = None if store is None else store.noise.find(series.hardware)
        if kept is None:
            return 0.0
        return NoiseCalibration.from_document(kept).floor(series.config, series.metric)

    return floor


def _text(history: History) -> str:
    parts = [terminal.table(overview_table(history))]
    for series, found in history.series:
        older = len(series.points) - _NEWEST
        parts.append(f"{series.name}\n{terminal.table(points_table(series, found, _NEWEST))}")
        parts += remarks(series, found)
        parts += [f"{older} older points are in the page"] if older > 0 else []
        parts.append("")
    return "\n".join(parts)
