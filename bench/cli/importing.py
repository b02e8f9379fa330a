"""`import`: the command line in front of `bench.importers`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cli import console
from bench.cli.console import Answer
from bench.cli.verbs.read import ImportRequest
from bench.errors import NothingMeasuredError, UsageError
from bench.importers.table import read_text
from bench.store import ResultsStore
from bench.workload import ImportedRun
from reports.compare.logs import Shown, absences, of_import, side_by_side, to_data
from reports.nccl.source import LogSource, StoppedError, find_sources, read_lines
from reports.renderers import terminal

STANDARD_INPUT = "pasted"
MOST_BYTES = 100 << 20  # 100 s
_PACKED = (".gz", ".zst", ".zstd")


def import_logs(request: ImportRequest) -> Answer:
    """Keep the runs of logs, or say what was kept.

    Raises:
        UsageError: a log that cannot be read, a name that is taken, or a fact that is none.
        NothingMeasuredError: no training step is found in any of the logs.
    """
    name, form, results = request.name, request.form, request.results
    if not request.logs:
        if name or form or request.facts:
            raise UsageError("--format, --name and --set say what a log is; name the log")
        damaged: list[str] = []
        kept = list(ResultsStore.open(results, create=False).imports.all(damaged))
        for problem in damaged:
            console.note(f"warning: left out: {problem}")
        return _shown(kept, results)
    read = read_logs(request.logs, form, dict(map(_fact, request.facts)))
    if name is not None and len(read) > 1:
        raise UsageError(f"--name names one text, found {len(read)} with runs in them")
    store = ResultsStore.open(results, create=True)
    named = [run for stem, runs in read for run in _named(name or stem, runs)]
    for run in named:
        if run.id in store.sweeps():
            raise UsageError(f"{run.id} is the name of a sweep in {results}; choose by --name")
    return _shown([store.imports.write(run) for run in named], results)


def read_logs(
    logs: Sequence[str], form: str | None, facts: dict[str, str]
) -> list[tuple[str, list[ImportedRun]]]:
    """Of files, folders and standard input: what each is called, and its runs.

    A text without a run is left out with a remark, as long as another has one.

    Raises:
        UsageError: a log that cannot be read, or a fact that is none.
        NothingMeasuredError: none of them has a run.
    """
    sources, remarks = find_sources(logs)
    for remark in remarks:
        console.note(remark)
    found: list[tuple[str, list[ImportedRun]]] = []
    without: list[str] = []
    for source in sources:
        shown = source.path.name if source.path else source.name
        try:
            found.append(
                (_stem(source), read_text(shown, blocks(source), form, facts, source.path))
            )
        except NothingMeasuredError as error:
            without.append(str(error))
    if not found:
        raise NothingMeasuredError("; ".join(without) or f"{', '.join(logs)} holds no text")
    for text in without:
        console.note(text)
    return found


def blocks(source: LogSource) -> Iterator[bytes]:
    """The bytes of a source, unpacked.

    Raises:
        UsageError: damaged or cut off data, or more than `MOST_BYTES`.
    """
    count = 0
    try:
        for line in read_lines(source):
            count += len(line)
            if count > MOST_BYTES:
                raise UsageError(
                    f"{source.name} holds more than {MOST_BYTES >> 20} MiB of text, unpacked; keep"
                    " the lines of steps, as with grep, and import these"
                )
            yield line
    except StoppedError as error:
        raise UsageError(f"{source.name} cannot be read to its end: {error}") from error


def _stem(source: LogSource) -> str:
    if source.path is None or not source.path.name.strip("0123456789"):
        return STANDARD_INPUT
    path = source.path
    while path.suffix in _PACKED:
        path = path.with_suffix("")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.") or STANDARD_INPUT


def is_log(name: str) -> bool:
    """Whether a name is a file that is read like those of `import`; a sweep file is none."""
    return name == "-" or (Path(name).is_file() and Path(name).suffix not in (".yaml", ".yml"))


def runs_of_log(name: str) -> list[ImportedRun]:
    """Those of one log, by their names.

    Raises:
        UsageError, NothingMeasuredError: as `read_logs`.
    """
    return [run for stem, runs in read_logs([name], None, {}) for run in _named(stem, runs)]


def _named(stem: str, runs: list[ImportedRun]) -> list[ImportedRun]:
    """The runs of one text, called after it, and after their labels where there are several."""
    alone = len(runs) == 1
    return [replace(run, id=stem if alone else f"{stem}.{run.id}") for run in runs]


def _fact(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: expected FIELD=VALUE, found {text!r}")
    return name.strip(), value.strip()


def _shown(runs: list[ImportedRun], results: Path) -> Answer:
    shown = [of_import(run) for run in runs]
    if not runs:
        return Answer(lambda: {"imports": []}, lambda: f"{results} holds no imported run")
    return Answer(
        lambda: {"imports": to_data(shown)},
        lambda: "\n".join([terminal.table(side_by_side(shown)), *doubts_of(shown)]),
    )


def doubts_of(shown: Sequence[Shown]) -> list[str]:
    """What logs do not say, those that lack the same in one line; then what is odd about each."""
    absent = [
        f"{names} {'do' if ', ' in names else 'does'} not say: {missing}"
        for names, missing in absences(shown)
    ]
    logs = [one.run for one in shown if one.run is not None]
    return absent + [f"{run.id}: {remark}" for run in logs for remark in run.provenance.remarks]
