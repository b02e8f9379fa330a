"""The runs of a text, and what of each is absent.

Whole files in which other projects' CI keeps what a run must give are read here, too: Megatron-LM's
`golden_values*.json` (metric -> steps and values, NaN as text), and event files of TensorBoard.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import NothingMeasuredError, UsageError
from bench.importers import labels, text
from bench.importers.formats import OURS, Format, read_format, shipped
from bench.importers.parsed import Parsed, some
from bench.importers.quantities import TABLES
from bench.importers.reading import FormatReader
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload


def read_text(
    source: str,
    blocks: Iterable[bytes],
    form: str | None,
    facts: dict[str, str],
    path: Path | None = None,
) -> list[ImportedRun]:
    """The runs of a text, in its order, by what each can be called.

    Args:
        source: what the text is called.
        blocks: the text.
        form: the name of a row, or a file that is one; None for all that are shipped.
        facts: fields of `Workload` that the caller knows better, as text.
        path: where it lies; None for a text that lies nowhere.

    Raises:
        UsageError: an unknown row, a fact that is none, event files that are damaged or without the
            package that reads them.
        NothingMeasuredError: it holds no step with a number of ours.
    """
    readers = list(map(FormatReader, _rows(form)))
    tracker = next((reader for reader in readers if reader.row.name == "tracker"), None)
    document: Parsed | None
    if tracker and ".tfevents." in source and path is not None:
        content, document = path.read_bytes(), _of_events(path, tracker)
    else:
        content = b"".join(blocks)
        document = _of_document(content, readers, tracker)
    sha256 = hashlib.sha256(content).hexdigest()
    if document is not None:
        if not document.has_values:
            no_number = "no metric of it has a number at a step"
            raise NothingMeasuredError(f"{source} holds no run: {no_number}")
        return _imported([document], source, sha256, facts)
    lines = (line.removesuffix(b"\n").decode(errors="replace") for line in io.BytesIO(content))
    parsed, without = text.runs_of(lines, readers)
    if not parsed:
        why = (
            f"no training step that {form or _all()} prints. Is it the log of the rank that prints?"
            " A table of steps can be imported from any framework (step,loss,milliseconds), other"
            " lines by --format FILE.yaml"
        )
        if without:
            why = f"expected times, losses, rates or memory of steps, found only {some(without)}."
            why += " --format FILE.yaml says what they mean"
        raise NothingMeasuredError(f"{source} holds no run: {why}")
    return _imported(parsed, source, sha256, facts)


def _imported(
    parsed: Sequence[Parsed], source: str, sha256: str, facts: dict[str, str]
) -> list[ImportedRun]:
    runs: list[ImportedRun] = []
    for run in parsed:
        steps = run.steps()
        workload = _workload(run, facts)
        provenance = Provenance(
            kind="imported",
            source=source,
            sha256=sha256,
            importer=run.importer,
            imported_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            label=run.label,
            side=run.side,
            stated=run.stated,
            lines=(run.first_line, run.last_line) if run.last_line else None,
            absent=_absent(workload, steps),
            remarks=tuple(run.remarks),
        )
        name = _unused(run.label, [r.id for r in runs])
        runs.append(ImportedRun(name, workload, provenance, steps, tuple(run.nccl)))
    steps_of_all = itertools.chain.from_iterable(run.steps for run in runs)
    if not any(getattr(step, name) is not None for step in steps_of_all for name in OURS):
        remarks = itertools.chain.from_iterable(run.provenance.remarks for run in runs)
        raise NothingMeasuredError(f"{source} holds no run: {'; '.join(remarks)}")
    return runs


def _of_document(
    content: bytes, readers: Sequence[FormatReader], tracker: FormatReader | None
) -> Parsed | None:
    """The run of a whole document of JSON; None where it is none of these."""
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return None
    try:
        document = json.loads(content.decode(errors="replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    run = next(filter(None, (reader.document(document) for reader in readers)), None)
    return _golden(document, tracker) if run is None and tracker is not None else run


def _golden(document: Mapping[str, Any], tracker: FormatReader) -> Parsed | None:
    """Values by step, or in a list from start_step on, as files of before 2025 have them.

    A lone number, as `iteration_timing_avg`, stands at the last step.
    """
    if not any(isinstance(of, dict) for of in document.values()):
        return None
    series: dict[str, dict[int, Any]] = {}
    for metric, of in document.items():
        if type(of) in (int, float):
            continue
        if not isinstance(of, dict) or "start_step" not in of or "end_step" not in of:
            return None
        values, first, apart = of.get("values"), of["start_step"], of.get("step_interval")
        if isinstance(values, list) and type(first) is type(apart) is int and first >= 0 < apart:
            values = {str(first + apart * at): value for at, value in enumerate(values)}
        if not isinstance(values, dict):
            return None
        series[metric] = {
            int(step): value for step, value in values.items() if re.fullmatch(r"\d{1,12}", step)
        }
    last = max((step for values in series.values() for step in values), default=0)
    lone = {name: {last: value} for name, value in document.items() if type(value) in (int, float)}
    return _run("golden", series | lone, tracker)


def _of_events(path: Path, tracker: FormatReader) -> Parsed:
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"{path.name} holds TensorBoard events, which need the package tensorboard: pip install"
            " 'mfsdp-bench[tensorboard]'"
        )
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    series: dict[str, dict[int, Any]] = {}
    try:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                numbers = make_ndarray(value.tensor) if value.HasField("tensor") else None
                if numbers is not None and numbers.size == 1 and numbers.dtype.kind in "fiu":
                    series.setdefault(value.tag, {})[int(event.step)] = float(numbers.reshape(()))
    except Exception as error:  # whatever that package says of a damaged file
        raise UsageError(f"{path.name} cannot be read as TensorBoard events: {error}") from error
    return _run("tensorboard", series, tracker)


def _run(kind: str, series: Mapping[str, Mapping[int, Any]], tracker: FormatReader) -> Parsed:
    """Steps that have any value; of a metric of no meaning to us, under its own name."""
    run = Parsed(kind)
    for step in sorted({step for values in series.values() for step in values}):
        told = [(name, str(values[step])) for name, values in series.items() if step in values]
        run.add(tracker.of_pairs(told, step), 0)
    run.workload["framework"] = "megatron-lm" if kind == "golden" else "unknown"
    return run


def _rows(form: str | None) -> tuple[Format, ...]:
    if form is None:
        return shipped()
    if form.endswith((".yaml", ".yml")):
        return (read_format(Path(form)),)
    if (row := _named_rows().get(form)) is None:
        raise UsageError(f"--format: expected {_all()} or FILE.yaml, found {form!r}")
    return (row,)


def _named_rows() -> dict[str, Format]:
    return {name: row for row in shipped() for name in row.files or (row.name,)}


def _all() -> str:
    return ", ".join(sorted(_named_rows()))


def _unused(label: str, taken: Sequence[str]) -> str:
    """A short name; where that is taken, with the words in brackets, then with a number."""
    short = labels.as_name(labels.without_brackets(label)) or "run"
    long = labels.as_name(label) or short
    numbered = (f"{long}-{count}" for count in itertools.count(2))
    return next(name for name in itertools.chain((short, long), numbered) if name not in taken)


def _workload(parsed: Parsed, facts: dict[str, str]) -> Workload:
    known = [name for name in Workload.model_fields if name != "settings"]
    if unknown := [name for name in facts if name not in known]:
        raise UsageError(f"--set {unknown[0]}: expected one of {', '.join(known)}")
    said = {name: value for name, value in parsed.workload.items() if name in Workload.model_fields}
    try:
        return Workload.model_validate({"framework": "unknown"} | said | facts)
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors()}
        if wrong & facts.keys():
            first = next(fault for fault in error.errors() if str(fault["loc"][0]) in facts)
            raise UsageError(
                f"--set {first['loc'][0]}: {first['msg']}, found {first['input']!r}"
            ) from error
        # What the text says there is of another kind than we take it for.
        parsed.remarks.append(f"not understood: {', '.join(sorted(wrong))}")
        kept = {name: value for name, value in said.items() if name not in wrong}
        return Workload.model_validate({"framework": "unknown"} | kept | facts)


def _absent(workload: Workload, steps: Sequence[ImportedStep]) -> tuple[str, ...]:
    told = (workload, *steps)
    return tuple(
        words
        for words, names in TABLES["looked_for"].items()
        if all(getattr(of, name, None) is None for of in told for name in names)
    )
