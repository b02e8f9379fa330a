"""One start of the ranks as history keeps it, and the file of them that only grows.

A line of the file is a start in JSON, with every number that is judged: a few hundred bytes a
night keep what a results folder of gigabytes knew, also where that folder is thrown away.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from bench.derive.hardware import UNKNOWN, hardware_key
from bench.derive.metrics import ALLOCATOR_PEAK, LOSS, STEP_TIME, THROUGHPUT, judged_metrics
from bench.errors import UsageError
from bench.record import RunRecord
from bench.store import DamagedRun, ResultsStore
from bench.workload import ImportedRun
from reports.comparisons.imported import of_import
from reports.comparisons.parity import tolerance_for
from reports.views.cells import Run
from reports.views.machine import describe_code

_COMMIT = 12


@dataclass(frozen=True)
class Start:
    """A finished run. Starts of one `config` on one kind of `hardware` are comparable.

    id: of the run. cell: what it is called. config: hash of the configuration. hardware: slug of
    its key, machine: the same in words. commit: of the code, or the name of an imported run. code:
    hash of the files that ran, "" if unknown. values: of judged metrics, by name, in their unit.
    loss_bound: relative difference that the dtypes explain.
    """

    id: str
    cell: str
    config: str
    hardware: str
    machine: str
    commit: str
    code: str
    utc: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT")]
    values: Mapping[str, Annotated[float, Field(allow_inf_nan=False)]]
    loss_bound: float | None = None
    history_version: Literal[1] = 1

    @property
    def day(self) -> str:
        """As `2026-03-01`, in UTC."""
        return self.utc[:10]


_START: TypeAdapter[Start] = TypeAdapter(Start)


def of_record(record: RunRecord) -> Start | None:
    """None where the run did not finish, is damaged, or does not say when it began."""
    run = Run.of(record)
    if not run.finished or not record.status.started_utc:
        return None
    key = hardware_key(record)
    values = {
        name: value
        for name, metric in judged_metrics().items()
        if not metric.alternatives
        and (value := run.value(metric)) is not None
        and math.isfinite(value)
    }
    status = record.status
    return Start(
        id=record.run_id,
        cell=status.cell or record.resolved.slug,
        config=record.resolved.config_hash,
        hardware=key.slug,
        machine=key.describe(),
        commit=describe_code(record),
        code=status.code,
        utc=status.started_utc,
        values=values,
        loss_bound=tolerance_for(record.resolved).bound,
    )


def of_imported(run: ImportedRun) -> Start | None:
    """A log says neither commit nor day: its label and the day of the import; None without these.

    Imported runs are of one configuration where everything that their logs say of it is equal.
    """
    shown, origin = of_import(run), run.provenance
    numbers = {
        STEP_TIME.name: shown.milliseconds,
        THROUGHPUT.name: shown.tokens_per_second,
        LOSS.name: shown.loss,
        ALLOCATOR_PEAK.name: shown.peak_bytes,
    }
    stated = run.workload.model_dump_json(exclude={"settings", "steps"})
    work = run.workload
    if not origin.imported_utc:
        return None
    return Start(
        id=f"imports/{run.id}",
        cell=f"imported: {' '.join(filter(None, (work.engine or work.framework, work.model)))}",
        config=hashlib.sha256(stated.encode()).hexdigest()[:_COMMIT],
        hardware=(work.device or UNKNOWN).lower(),
        machine=work.device or UNKNOWN,
        commit=origin.label or run.id,
        code="",
        utc=origin.imported_utc,
        values={name: value for name, value in numbers.items() if value is not None},
    )


def starts_of(store: ResultsStore) -> tuple[list[Start], list[str]]:
    """All finished runs of a results folder, imported ones included; and why others are left out.

    Runs that failed or were stopped are no starts, and nothing is said of them.
    """
    damaged: list[DamagedRun] = []
    found: list[Start | None] = []
    problems: list[str] = []
    for record in store.records(damaged=damaged):
        found.append(of_record(record))
        if Run.of(record).kind == "damaged":
            damaged.append(DamagedRun(record.run_id, "; ".join(record.damage or record.problems)))
    found += [of_imported(run) for run in store.imports.all(problems)]
    problems = [f"{one.run_id}: {one.problem}" for one in damaged] + problems
    starts = [start for start in found if start is not None]
    return starts, [f"left out: {problem}" for problem in problems]


def read_archive(path: Path) -> tuple[list[Start], list[str]]:
    """Starts of a file of starts or of a results folder, and a sentence per one that is none.

    Raises:
        UsageError: there is neither.
    """
    if path.is_dir():
        return starts_of(ResultsStore.open(path, create=False))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: expected a file that `history --append` made, or a results folder ({error})"
        ) from error
    found, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_START.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problems.append(f"{path}:{number} is left out: {where} {first['msg']}".strip())
    return found, problems


def to_lines(starts: Sequence[Start]) -> Iterator[str]:
    """What a file of starts holds."""
    for start in starts:
        yield json.dumps(asdict(start), sort_keys=True, allow_nan=False) + "\n"


def each_once(starts: Sequence[Start]) -> list[Start]:
    """In the order of their measurement; a start that several sources have, once."""
    known = {(start.id, start.utc): start for start in starts}
    return sorted(known.values(), key=lambda start: (start.utc, start.id))
