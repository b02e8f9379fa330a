"""`import`: the command line in front of `bench.importers`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console
from bench.cli.verb import Answer, ResultsOption, argument, option
from bench.errors import NothingMeasuredError, UsageError
from reports.renderers.document import Block, Code, Paragraph, TableBlock

if TYPE_CHECKING:
    from bench.workload import ImportedRun
    from reports.compare.logs import Shown
    from reports.nccl.source import LogSource

STANDARD_INPUT = "pasted"
MOST_BYTES = 100 << 20  # 100 s
_PACKED = (".gz", ".zst", ".zstd")


class ImportVerb(ResultsOption, name="import"):
    """Keep the runs in a log or text of another framework.

    Examples:
        import base.log --set device=H100 --set seq_len=8192
        import head.log && mfsdp-bench compare base head --format md
        import - --name pr3067 < page.txt
    """

    logs: tuple[str, ...] = argument(
        "LOG", "Files, folders, or - for standard input; the list of imports if left out.", ()
    )
    form: str | None = option(
        "--format NAME|FILE",
        "What wrote it: automodel, composer, deepspeed, golden, jsonl, maxtext, megatron, nanotron,"
        " nemo, pairs, table, tensorboard, torchtitan, trainer, verl, or FILE.yaml; else found.",
    )
    name: str | None = option(
        "--name NAME",
        "That of the file if left out; before the labels of several runs in it.",
    )
    facts: tuple[str, ...] = option(
        "--set FIELD=VALUE", "What the log does not say, as seq_len=8192.", ()
    )

    def run(self) -> Answer:
        """What is kept now, or was kept."""
        if not self.logs:
            if self.name or self.form or self.facts:
                raise UsageError("--format, --name and --set say what a log is; name the log")
            damaged: list[str] = []
            kept = list(self.store().imports.all(damaged))
            for problem in damaged:
                console.note(f"warning: left out: {problem}")
            return self._answer(kept)
        read = read_logs(self.logs, self.form, dict(map(_fact, self.facts)))
        if self.name is not None and len(read) > 1:
            raise UsageError(f"--name names one text, found {len(read)} with runs in them")
        store = self.store(create=True)
        named = [run for stem, runs in read for run in _named(self.name or stem, runs)]
        for run in named:
            if run.id in store.sweeps():
                raise UsageError(
                    f"{run.id} is the name of a sweep in {self.results}; choose by --name"
                )
        return self._answer([store.imports.write(run) for run in named])

    def _answer(self, runs: Sequence[ImportedRun]) -> Answer:
        from reports.compare.logs import of_import, side_by_side, to_data

        shown = [of_import(run) for run in runs]
        document: list[Block] = [Paragraph(f"{self.results} holds no imported run")]
        if shown:
            document = [TableBlock(side_by_side(shown))]
            document += [Code("\n".join(doubts))] if (doubts := doubts_of(shown)) else []
        return Answer(document, {"imports": to_data(shown)})


def read_logs(
    logs: Sequence[str], form: str | None = None, facts: Mapping[str, str] | None = None
) -> list[tuple[str, list[ImportedRun]]]:
    """Of files, folders and standard input: what each is called, and its runs.

    A text without a run is left out with a remark, as long as another has one.

    Raises:
        UsageError: a log that cannot be read, or a fact that is none.
        NothingMeasuredError: none of them has a run.
    """
    from bench.importers.table import read_text
    from reports.nccl.source import find_sources

    sources, remarks = find_sources(logs)
    for remark in remarks:
        console.note(remark)
    texts: list[tuple[str, list[ImportedRun]]] = []
    without: list[str] = []
    for source in sources:
        shown = source.path.name if source.path else source.name
        try:
            runs = read_text(shown, _blocks(source), form, dict(facts or {}), source.path)
        except NothingMeasuredError as error:
            without.append(str(error))
        else:
            texts.append((_stem(source), runs))
    if not texts:
        raise NothingMeasuredError("; ".join(without) or f"{', '.join(logs)} holds no text")
    for text in without:
        console.note(text)
    return texts


def _blocks(source: LogSource) -> Iterator[bytes]:
    """The bytes of a source, unpacked.

    Raises:
        UsageError: damaged or cut off data, or more than `MOST_BYTES`.
    """
    from reports.nccl.source import StoppedError, read_lines

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
    return [run for stem, runs in read_logs([name]) for run in _named(stem, runs)]


def _named(stem: str, runs: Sequence[ImportedRun]) -> list[ImportedRun]:
    """The runs of one text, called after it, and after their labels where there are several."""
    alone = len(runs) == 1
    return [replace(run, id=stem if alone else f"{stem}.{run.id}") for run in runs]


def _fact(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: expected FIELD=VALUE, found {text!r}")
    return name.strip(), value.strip()


def doubts_of(shown: Sequence[Shown]) -> list[str]:
    """What logs do not say, those that lack the same in one line; then what is odd about each."""
    from reports.compare.logs import absences

    absent = [
        f"{names} {'do' if ', ' in names else 'does'} not say: {missing}"
        for names, missing in absences(shown)
    ]
    logs = [run.run for run in shown if run.run is not None]
    return absent + [f"{run.id}: {remark}" for run in logs for remark in run.provenance.remarks]
