"""The importers, and what of a log is absent. To add one: a module with `read`, and a row here."""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from bench.errors import NothingMeasuredError, UsageError
from bench.importers import csv_table, megatron, torchtitan
from bench.importers.parsed import Parsed
from bench.workload import ImportedStep, Provenance, Workload

Reader = Callable[[Iterable[str]], Parsed]

IMPORTERS: dict[str, Reader] = {
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
    "csv": csv_table.read,
}
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


def read_log(
    log: Path, form: str | None, facts: dict[str, str]
) -> tuple[Workload, Provenance, tuple[ImportedStep, ...]]:
    """What a log tells. facts: fields of `Workload` that the caller knows better, as text.

    Raises:
        UsageError: no file that can be read, an unknown importer, or a fact that is none.
        NothingMeasuredError: no importer finds a step in it.
    """
    if form is not None and form not in IMPORTERS:
        raise UsageError(f"--from: expected one of {', '.join(IMPORTERS)}, found {form!r}")
    if not log.is_file():
        raise UsageError(f"{log}: expected a log file, found nothing or no file")
    try:
        sha256 = hashlib.sha256(log.read_bytes()).hexdigest()
        name, parsed = _read(log, [form] if form else [*IMPORTERS])
    except OSError as error:
        raise UsageError(f"{log} cannot be read: {error.strerror}") from error
    except csv.Error as error:
        raise UsageError(f"{log} is no table as CSV: {error}") from error
    steps = tuple(parsed.steps[number] for number in sorted(parsed.steps))
    workload = _workload(parsed, facts)
    provenance = Provenance(
        kind="imported",
        source=log.name,
        sha256=sha256,
        importer=name,
        imported_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        absent=_absent(workload, steps),
        remarks=(*parsed.remarks, *_about_steps(parsed)),
    )
    return workload, provenance, steps


def _read(log: Path, names: Sequence[str]) -> tuple[str, Parsed]:
    for name in names:
        with log.open(errors="replace", newline="") as lines:
            parsed = IMPORTERS[name](lines)
        if parsed.steps:
            return name, parsed
    raise NothingMeasuredError(
        f"{log} has no training step that {' or '.join(names)} prints. Is it the log of the rank"
        " that prints? A table of steps as CSV can be imported from any framework:"
        f" {','.join(csv_table.COLUMNS)}"
    )


def _workload(parsed: Parsed, facts: dict[str, str]) -> Workload:
    unknown = [name for name in facts if name not in Workload.model_fields or name == "settings"]
    if unknown:
        known = ", ".join(name for name in Workload.model_fields if name != "settings")
        raise UsageError(f"--set {unknown[0]}: expected one of {known}")
    try:
        return Workload.model_validate({"framework": "unknown"} | parsed.workload | facts)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"--set {field}: {first['msg']}, found {first['input']!r}") from error


def _about_steps(parsed: Parsed) -> tuple[str, ...]:
    told = (step for step in parsed.steps.values() if step.loss or step.milliseconds)
    numbers = sorted(step.step for step in told)
    found = []
    if parsed.repeated:
        found.append(
            f"{len(parsed.repeated)} steps stand more than once with other numbers, as step"
            f" {min(parsed.repeated)}: the last line counts"
        )
    gaps = {after - before for before, after in itertools.pairwise(numbers)}
    if gaps and gaps != {1}:
        found.append("not every step has a line, so that a line may be a mean over several steps")
    return tuple(found)


def _absent(workload: Workload, steps: Sequence[ImportedStep]) -> tuple[str, ...]:
    of_steps = [
        words
        for words, names in _OF_STEPS.items()
        if all(getattr(step, name) is None for step in steps for name in names)
    ]
    of_workload = [words for words, name in _OF_WORKLOAD.items() if getattr(workload, name) is None]
    return (*of_steps, *of_workload)
