"""A results folder as pandas frames, for notebooks and for `mfsdp-bench export`.

    from reports.frames import read_frames
    runs, steps, problems = read_frames("results")
    runs.groupby("cell")["step_milliseconds_median"].median()

Units are in the names of columns. What was not measured is missing (NaN), never zero. Damaged runs
are left out and named in `problems`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.derive.summary import summarise
from bench.errors import DamagedRecordError, UsageError
from bench.record import RunRecord, RunSummary
from bench.redaction import redact
from bench.store import DamagedRun, ResultsStore
from bench.workload import ImportedRun
from reports.compare.logs import of_import
from reports.views.machine import entries

if TYPE_CHECKING:
    from pandas import DataFrame

_STATUS = ("sweep", "cell", "arm", "repeat", "attempt", "state", "reason", "code", "code_proof")
_TIMES = ("started_utc", "ended_utc")
_NOT_NUMBERS = {
    "formula",
    "steady",
    "memory_by_category_bytes",
    "cpu_milliseconds_by_thread",
    "phase_milliseconds",
    "counts",
    "notes",
}
_NUMBERS = {*RunSummary.model_fields, "grad_norm"} - _NOT_NUMBERS - {"ledger_is_measured"}
_SECTIONS = ("data", "engine", "dtypes", "train", "launch", "measure")


class Frames(NamedTuple):
    """`runs`: one row per run. `steps`: one row per step of a rank, `run_id` and `rank` first.

    Imported runs have the state `imported`, and no rank.

    problems: a sentence for every run that could not be read as a whole.
    """

    runs: DataFrame
    steps: DataFrame
    problems: tuple[str, ...] = ()


def read_frames(results: str | Path, sweeps: Sequence[str] = ()) -> Frames:
    """All runs of a results folder, or those of `sweeps`, as frames.

    Settings are columns such as `engine.name` and `train.lr`; numbers are derived from the raw
    samples when this is called.

    Raises:
        UsageError: not a results folder, or a sweep that it does not hold.
    """
    import pandas as pd

    store = ResultsStore.open(results, create=False)
    damaged: list[DamagedRun] = []
    records = _chosen(store, sweeps, damaged)
    problems = [f"{run.run_id}: {run.problem}" for run in damaged]
    problems += [f"{record.run_id}: {text}" for record in records for text in record.problems]
    imported = _imported(store, sweeps, problems)
    runs = pd.DataFrame([*map(_run_row, records), *map(_imported_row, imported)])
    rows = [row for record in records for row in _step_rows(record)]
    steps = pd.DataFrame([*rows, *(row for run in imported for row in _imported_steps(run))])
    for column in _TIMES:
        if column in runs:
            runs[column] = pd.to_datetime(runs[column], utc=True, errors="coerce")
    for frame in (runs, steps):
        # A column of which nothing was measured is still one of numbers.
        numbers = [name for name in frame.columns if name in _NUMBERS or name.endswith("_bytes")]
        frame[numbers] = frame[numbers].astype("float64")
    return Frames(runs, steps, tuple(problems))


def _chosen(
    store: ResultsStore, sweeps: Sequence[str], damaged: list[DamagedRun]
) -> list[RunRecord]:
    records = list(store.records(damaged=damaged))
    known = {record.status.sweep for record in records} | {*store.sweeps(), *store.imports.ids()}
    for sweep in sweeps:
        if sweep not in known:
            names = ", ".join(sorted(name for name in known if name)) or "none"
            raise UsageError(f"no sweep {sweep!r} in {store.root}; it holds: {names}")
    return [record for record in records if not sweeps or record.status.sweep in sweeps]


def _imported(store: ResultsStore, names: Sequence[str], problems: list[str]) -> list[ImportedRun]:
    runs = []
    for name in store.imports.ids():
        if not names or name in names:
            try:
                runs.append(store.imports.read(name))
            except DamagedRecordError as error:
                problems.append(f"{name}: {error}")
    return runs


def _imported_row(run: ImportedRun) -> dict[str, Any]:
    """What a log says, under the names that measured runs have."""
    shown, work = of_import(run), run.workload
    return {
        "run_id": run.id,
        "cell": run.provenance.label or run.id,
        "state": "imported",
        "reason": run.provenance.source,
        "notes": "; ".join(run.provenance.remarks),
        "step_milliseconds_median": shown.pace.milliseconds,
        "tokens_per_second": shown.pace.tokens_per_second,
        "final_loss": shown.loss,
        "device_peak_bytes": shown.peak_bytes,
        "engine.name": work.engine or work.framework,
        "model": work.model,
        "parameters": work.parameters,
        "strategy": work.strategy,
        "tokens_per_step": work.tokens_per_step,
        "train.global_batch": work.global_batch,
        "train.seq_len": work.seq_len,
        "launch.ranks": work.ranks,
    }


def _imported_steps(run: ImportedRun) -> Iterator[dict[str, Any]]:
    for step in run.steps:
        row = asdict(step)
        # Under names of others there is no end of columns.
        others = row.pop("extra")
        del row["lines"]
        yield {"run_id": run.id, **row, "extra": json.dumps(others) if others else None}


def _run_row(record: RunRecord) -> dict[str, Any]:
    status = record.status.model_dump()
    summary = summarise(record)
    row: dict[str, Any] = {"run_id": record.run_id}
    row |= {name: status[name] for name in (*_STATUS, *_TIMES)}
    row |= {name: value for name, value in summary.model_dump().items() if name not in _NOT_NUMBERS}
    row["steady"] = None if summary.steady is None else summary.steady.stable
    row["notes"] = "; ".join(summary.notes)
    for name, size in sorted(summary.memory_by_category_bytes.items()):
        row[f"memory.{name}_bytes"] = size
    row |= {f"counts.{name}": count for name, count in sorted(summary.counts.items())}
    row |= _prefixed("cpu", summary.cpu_milliseconds_by_thread)
    row |= _prefixed("phase", summary.phase_milliseconds)
    row["config_hash"] = record.resolved.config_hash
    shape = record.resolved.shape
    row["model"] = None if shape is None else shape.preset
    row["parameters"] = None if shape is None else shape.parameters
    row["strategy"] = record.resolved.strategy
    row["tokens_per_step"] = record.resolved.tokens_per_step
    row |= _settings(record)
    git = entries(record.environment, "git")
    row |= {
        "hostname": record.environment.get("hostname"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
    }
    return row


def _settings(record: RunRecord) -> dict[str, Any]:
    document = record.resolved.model_dump(mode="json")
    settings: dict[str, Any] = {}
    for section in _SECTIONS:
        for name, value in document[section].items():
            if name == "env":
                settings |= {f"env.{variable}": text for variable, text in redact(value).items()}
            elif not isinstance(value, dict | list):
                settings[f"{section}.{name}"] = value
    return settings


def _step_rows(record: RunRecord) -> Iterator[dict[str, Any]]:
    status = record.status
    for rank, samples in sorted(record.steps.items()):
        for sample in samples:
            numbers = asdict(sample)
            by_thread = numbers.pop("cpu_milliseconds") or {}
            phases = numbers.pop("phase_milliseconds") or {}
            device = numbers.pop("device") or {}
            yield {
                "run_id": record.run_id,
                "rank": rank,
                "sweep": status.sweep,
                "cell": status.cell,
                "arm": status.arm,
                "repeat": status.repeat,
                **numbers,
                **_prefixed("cpu", by_thread),
                **_prefixed("phase", phases),
                **{f"device.{name}": _plain(value) for name, value in sorted(device.items())},
            }


def _prefixed(kind: str, milliseconds: dict[str, float]) -> dict[str, float]:
    return {f"{kind}.{name}_milliseconds": time for name, time in sorted(milliseconds.items())}


def _plain(value: Any) -> Any:
    """One value for a table: reasons of throttling as a text."""
    return " ".join(map(str, value)) if isinstance(value, list) else value
