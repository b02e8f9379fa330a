"""The runs of a text, and what of each is absent."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from bench.errors import NothingMeasuredError, UsageError
from bench.importers import ci_files, labels, text
from bench.importers.formats import OURS, Format, read_format, shipped
from bench.importers.parsed import Parsed, some
from bench.importers.reading import FormatReader
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload

# In words, and the fields of which one at least must be there.
_OF_STEPS = {
    "step times": ("milliseconds", "tokens_per_second_per_device"),
    "losses": ("loss",),
    "gradient norms": ("grad_norm",),
    "peak memory": ("device_peak_bytes", "device_reserved_peak_bytes"),
}
_OF_WORKLOAD = {
    "engine": "engine",
    "model": "model",
    "device": "device",
    "number of ranks": "ranks",
    "global batch": "global_batch",
    "sequence length": "seq_len",
}
_LONGEST_UNBROKEN = 1 << 28


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
        UsageError: an unknown row, or a fact that is none.
        NothingMeasuredError: it holds no step with a number of ours.
    """
    readers = list(map(FormatReader, _rows(form)))
    digest = hashlib.sha256()
    whole = ci_files.read_file(source, blocks, path, readers)
    if isinstance(whole, ci_files.WholeFile) and not whole.run.has_values:
        raise NothingMeasuredError(f"{source} holds no run: no metric of it has a number at a step")
    if isinstance(whole, ci_files.WholeFile):
        return _imported([whole.run], source, whole.sha256, facts)
    lines = _lines(whole, digest.update)
    parsed, without = text.runs_of(lines, readers)
    if not parsed and without:
        raise NothingMeasuredError(
            f"{source} holds no run: expected times, losses, rates or memory of steps, found only"
            f" {some(without)}. --format FILE.yaml says what they mean"
        )
    if not parsed:
        raise NothingMeasuredError(
            f"{source} holds no run: no training step that {form or _all()} prints."
            " Is it the log of the rank that prints? A table of steps can be imported from any"
            " framework (step,loss,milliseconds), other lines by --format FILE.yaml"
        )
    return _imported(parsed, source, digest.hexdigest(), facts)


def _imported(
    parsed: Sequence[Parsed], source: str, sha256: str, facts: dict[str, str]
) -> list[ImportedRun]:
    found: list[ImportedRun] = []
    for run in parsed:
        steps = run.steps()
        workload = _workload(run, facts)
        provenance = Provenance(
            kind="imported",
            source=source,
            sha256=sha256,
            importer=run.importer or "nccl",
            imported_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            label=run.label,
            stated=run.stated,
            lines=(run.first_line, run.last_line) if run.last_line else None,
            absent=_absent(workload, steps),
            remarks=tuple(run.remarks),
        )
        name = _unused(run.label, [one.id for one in found])
        found.append(ImportedRun(name, workload, provenance, steps, tuple(run.nccl)))
    steps_of_all = itertools.chain.from_iterable(run.steps for run in found)
    if not any(getattr(step, name) is not None for step in steps_of_all for name in OURS):
        remarks = itertools.chain.from_iterable(run.provenance.remarks for run in found)
        raise NothingMeasuredError(f"{source} holds no run: {'; '.join(remarks)}")
    return found


def _lines(blocks: Iterable[bytes], seen: Callable[[bytes], None]) -> Iterator[str]:
    rest = b""
    for block in blocks:
        seen(block)
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
        if len(rest) > _LONGEST_UNBROKEN:
            raise UsageError("a line of more than 256 MiB; expected a text")
    if rest:
        yield rest.decode(errors="replace")


def _rows(form: str | None) -> tuple[Format, ...]:
    if form is None:
        return shipped()
    if form.endswith((".yaml", ".yml")):
        return (read_format(Path(form)),)
    if not (named := tuple(row for row in _readable() if row.name == form)):
        raise UsageError(f"--format: expected {_all()} or FILE.yaml, found {form!r}")
    return named


def _readable() -> tuple[Format, ...]:
    """Rows of texts; the others name the metrics of whole files."""
    return tuple(row for row in shipped() if row.lines or row.patterns)


def _all() -> str:
    return ", ".join(row.name for row in _readable())


def _unused(label: str, taken: Sequence[str]) -> str:
    """A short name; where that is taken, with the words in brackets, then with a number."""
    short = labels.as_name(labels.without_brackets(label)) or "run"
    if short not in taken:
        return short
    long = labels.as_name(label) or short
    numbered = (f"{long}-{count}" for count in itertools.count(2))
    return next(one for one in itertools.chain((long,), numbered) if one not in taken)


def _workload(parsed: Parsed, facts: dict[str, str]) -> Workload:
    unknown = [name for name in facts if name not in Workload.model_fields or name == "settings"]
    if unknown:
        known = ", ".join(name for name in Workload.model_fields if name != "settings")
        raise UsageError(f"--set {unknown[0]}: expected one of {known}")
    said = {name: one for name, one in parsed.workload.items() if name in Workload.model_fields}
    try:
        return Workload.model_validate({"framework": "unknown"} | said | facts)
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors()}
        if wrong & facts.keys():
            first = next(one for one in error.errors() if str(one["loc"][0]) in facts)
            raise UsageError(
                f"--set {first['loc'][0]}: {first['msg']}, found {first['input']!r}"
            ) from error
        # What the text says there is of another kind than we take it for.
        parsed.remarks.append(f"not understood: {', '.join(sorted(wrong))}")
        kept = {name: one for name, one in said.items() if name not in wrong}
        return Workload.model_validate({"framework": "unknown"} | kept | facts)


def _absent(workload: Workload, steps: Sequence[ImportedStep]) -> tuple[str, ...]:
    of_steps = [
        words
        for words, names in _OF_STEPS.items()
        if all(getattr(step, name) is None for step in steps for name in names)
    ]
    of_workload = [words for words, name in _OF_WORKLOAD.items() if getattr(workload, name) is None]
    return (*of_steps, *of_workload)
