"""`history`: the command line in front of `reports.history`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.policies import read_policy
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


def show_history(
    named: str,
    results: Path,
    *,
    archives: Sequence[Path],
    append: Path | None,
    policy_file: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Print the tables and write the page.

    Raises:
        UsageError: no such metric, archive or policy, or a folder that cannot be written.
        NothingMeasuredError: no start has the metric.
    """
    known = judged_metrics()
    if named not in known:
        raise UsageError(
            f"expected a metric that gates judge ({', '.join(known)}), found {named!r}"
            f"{did_you_mean(named, known)}"
        )
    starts, problems, floor = _gathered(results, archives, append)
    found = series_of(starts, known[named])
    if not found:
        raise NothingMeasuredError(f"no finished run of {results} has {named}")
    policy = read_policy(policy_file)
    history = History(
        named,
        tuple(found),
        tuple(
            levels(one, policy.rules[one.metric.name], alpha=policy.alpha, floor=floor(one))
            for one in found
        ),
        tuple(problems),
    )
    for problem in problems:
        console.note(f"warning: {problem}")
    folder, _ = write_document(document(history), out or results / "reports" / f"history-{named}")
    if as_json:
        console.data_json(to_data(history) | {"html": str(folder / HTML_NAME)})
    else:
        _print(history)
        console.data(str(folder / HTML_NAME))
    return exit_codes.OK


def _gathered(
    results: Path, archives: Sequence[Path], append: Path | None
) -> tuple[list[Start], list[str], Floor]:
    """Starts of all sources, lines that are none, and the noise floors of the results folder."""
    store = None
    if results.exists() or not (archives or append):
        store = ResultsStore.open(results, create=False)
    starts = starts_of(store) if store else []
    problems: list[str] = []
    if append is not None:
        kept, problems = read_archive(append) if append.exists() else ([], [])
        before = {start.id for start in kept}
        new = [start for start in each_once(starts) if start.id not in before]
        text = append.read_text() if append.exists() else ""
        console.write_file(append, text + "".join(to_lines(new)))
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


def _print(history: History) -> None:
    console.data(terminal.table(overview_table(history)))
    for series, found in zip(history.series, history.found, strict=True):
        older = len(series.points) - _NEWEST
        console.data(f"{series.name}\n{terminal.table(points_table(series, found, _NEWEST))}")
        said = remarks(series, found)
        said += [f"{older} older points are in the page"] if older > 0 else []
        console.data("\n".join([*said, ""]))
