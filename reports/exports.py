"""A results folder in the formats that other projects' CI and dashboards read.

golden                    Megatron-LM's golden values, a file per run
torchtitan                its reference losses, a file per run
pytorch                   records of PyTorch's benchmark database, version 3
bencher                   Bencher's metric format; bounds are our interval
github-action-benchmark   two files: smaller and bigger is better
asv                       machine, benchmarks and a file of results per commit
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, Final

from bench.derive.metrics import GRAD_NORM, LOSS, Metric, judged_metrics
from bench.derive.summary import common_steps, step_milliseconds
from bench.store import ResultsStore
from bench.workload import ImportedStep, Workload
from reports.compare.parity import losses
from reports.compare.samples import CellSamples, cell_samples, imported_samples
from reports.compare.statistics import Interval, Rearrangements, subset_means
from reports.views.cells import Cell, Run
from reports.views.machine import entries
from reports.views.sweep_view import load_sweeps

_ALPHA: Final = 0.05
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")
_BIGGER: Final = "higher_is_better"
_ASV_VERSION: Final = 2
_ASV_MACHINE_VERSION: Final = 1
_ASV_COLUMNS: Final = [
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"),
]
# Name in Megatron-LM's files -> (field of a step, factor into its unit).
_GOLDEN: Final = {
    "lm loss": ("loss", 1.0),
    "grad-norm": ("grad_norm", 1.0),
    "mem-allocated-bytes": ("device_allocated_bytes", 1.0),
    "mem-max-allocated-bytes": ("device_peak_bytes", 1.0),
    "iteration-time": ("milliseconds", 1e-3),
}


@dataclass(frozen=True)
class Measure:
    """One metric of one cell: a number per run, and the interval of their centre if it is known."""

    metric: Metric
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """Median over runs."""
        return median(self.values)

    @property
    def interval(self) -> Interval | None:
        """At 95 %, of values that are symmetric around their centre; None of too few runs."""
        return Rearrangements(subset_means(self.values)).interval(_ALPHA)

    @property
    def bigger_is_better(self) -> bool:
        """By the default policy."""
        return self.metric.rule is not None and self.metric.rule.direction == _BIGGER


@dataclass(frozen=True)
class Exported:
    """A cell of a sweep, or an imported run. steps: of its first finished run.

    commit: 40 digits, "" if its code is of no commit. utc: when its first run began.
    """

    name: str
    workload: Workload
    samples: CellSamples
    steps: tuple[ImportedStep, ...]
    commit: str
    utc: str
    python: str = ""
    hostname: str = "unknown"

    @property
    def file(self) -> str:
        """Its name as a part of a file name."""
        return _NOT_PLAIN.sub("-", self.name).strip("-.")

    def measures(self) -> Iterator[Measure]:
        """Of every judged metric that was measured, then the last loss and gradient norm."""
        known = judged_metrics()
        for name, numbers in self.samples.values.items():
            if name in known and numbers:
                yield Measure(known[name], tuple(numbers.values()))
        for metric in (LOSS, GRAD_NORM):
            curves = self.samples.curves.get(metric.name, ())
            if last := tuple(curve.values[-1] for curve in curves if curve.values):
                yield Measure(metric, last)


def exported(store: ResultsStore, names: Sequence[str]) -> list[Exported]:
    """Finished cells of the sweeps, and the imports, of these names; of all where none is given."""
    sweeps = [name for name in store.sweeps() if not names or name in names]
    views = load_sweeps(store, sweeps) if sweeps else []
    found = [_of_cell(view.id, cell) for view in views for cell in view.cells if cell.finished]
    for name in store.imports.ids():
        if not names or name in names:
            run = store.imports.read(name)
            samples, utc = imported_samples(run), run.provenance.imported_utc
            found.append(Exported(name, run.workload, samples, run.steps, "", utc))
    return found


def _of_cell(sweep: str, cell: Cell) -> Exported:
    record = cell.finished[0].record
    git, runtime = entries(record.environment, "git"), record.runtime
    commit = "" if git.get("dirty") else str(git.get("commit") or "")
    return Exported(
        f"{sweep}/{cell.name}",
        record.workload,
        cell_samples(cell),
        _steps(cell.finished[0]),
        commit if _COMMIT.fullmatch(commit) else "",
        record.status.started_utc,
        str(runtime.get("python") or ""),
        str(record.environment.get("hostname") or "unknown"),
    )


def _steps(run: Run) -> tuple[ImportedStep, ...]:
    """Times of the slowest rank, losses and norms as means over ranks."""
    grouped = common_steps(run.record.steps)
    times = step_milliseconds(grouped)
    curves = (losses(run.record, name) for name in (LOSS.name, GRAD_NORM.name))
    rows = itertools.islice(itertools.zip_longest(times, *curves), len(times))
    return tuple(
        ImportedStep(number, milliseconds=time, loss=loss, grad_norm=norm)
        for number, (time, loss, norm) in enumerate(rows, start=1)
    )


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def golden(found: Sequence[Exported]) -> dict[str, str]:
    """Every step; what a step does not tell is `nan`, as Megatron-LM writes it."""
    return {f"golden_values_{one.file}.json": _golden(one.steps) for one in found if one.steps}


def _golden(steps: Sequence[ImportedStep]) -> str:
    numbers = [step.step for step in steps]
    gaps = {after - before for before, after in itertools.pairwise(numbers)}
    document = {}
    for metric, (field, factor) in _GOLDEN.items():
        told = {str(step.step): getattr(step, field) for step in steps}
        if any(value is not None for value in told.values()):
            document[metric] = {
                "start_step": numbers[0],
                "end_step": numbers[-1],
                "step_interval": min(gaps, default=1),
                "values": {
                    step: "nan" if value is None else value * factor if factor != 1 else value
                    for step, value in told.items()
                },
            }
    return _json(document)


def torchtitan(found: Sequence[Exported]) -> dict[str, str]:
    """Runs with losses; the third column where every step has a norm."""
    return {f"{one.file}.txt": text for one in found if (text := _losses(one))}


def _losses(one: Exported) -> str:
    told = [step for step in one.steps if step.loss is not None]
    normed = all(step.grad_norm is not None for step in told)
    rows = [
        f"{step.step} {step.loss!r}" + (f" {step.grad_norm!r}" if normed else "") for step in told
    ]
    ranks = [] if one.workload.ranks is None else [f"# ngpu: {one.workload.ranks}"]
    head = [f"# config: {one.name}", *ranks, "# step loss" + (" grad_norm" if normed else "")]
    return "\n".join([*head, *rows, ""]) if rows else ""


def pytorch(found: Sequence[Exported]) -> dict[str, str]:
    """One record per cell and metric, a value per run."""
    records = [
        {
            "benchmark": {
                "name": "mfsdp-bench",
                "mode": "training",
                "dtype": one.workload.compute_dtype or "unknown",
                "extra_info": _plain({"cell": one.name, "strategy": one.workload.strategy}),
            },
            "model": {
                "name": one.workload.model or "unknown",
                "type": "training",
                "backend": one.workload.engine or one.workload.framework,
            },
            "metric": {
                "name": measure.metric.name,
                "benchmark_values": list(measure.values),
                "extra_info": _plain({"unit": measure.metric.unit, "commit": one.commit}),
            },
        }
        for one, measure in _all(found)
    ]
    return {"pytorch.json": _json(records)} if records else {}


def bencher(found: Sequence[Exported]) -> dict[str, str]:
    """Bounds where so many runs give an interval."""
    document: dict[str, dict[str, dict[str, float]]] = {}
    for one, measure in _all(found):
        said = {"value": measure.value}
        if measure.interval is not None:
            said |= dict(zip(("lower_value", "upper_value"), measure.interval, strict=True))
        document.setdefault(one.name, {})[measure.metric.name] = said
    return {"bencher.json": _json(document)} if document else {}


def github_action_benchmark(found: Sequence[Exported]) -> dict[str, str]:
    """For its tools customSmallerIsBetter and customBiggerIsBetter."""
    files: dict[str, list[dict[str, Any]]] = {}
    for one, measure in _all(found):
        entry: dict[str, Any] = {
            "name": f"{one.name}: {measure.metric.name}",
            "unit": measure.metric.unit or "1",
            "value": measure.value,
            "extra": f"{len(measure.values)} runs",
        }
        if measure.interval is not None:
            entry["range"] = "{:g} to {:g}".format(*measure.interval)
        file = "bigger.json" if measure.bigger_is_better else "smaller.json"
        files.setdefault(file, []).append(entry)
    return {file: _json(entries_) for file, entries_ in files.items()}


def asv(found: Sequence[Exported]) -> dict[str, str]:
    """Cells whose code is a commit; machines are hosts."""
    files: dict[str, str] = {}
    benchmarks: dict[str, Any] = {"version": _ASV_VERSION}
    grouped: dict[tuple[str, str, str], list[Exported]] = {}
    for one in found:
        if one.commit:
            machine = _NOT_PLAIN.sub("-", one.hostname) or "unknown"
            grouped.setdefault((machine, one.commit, one.python or "unknown"), []).append(one)
    for (machine, commit, python), members in grouped.items():
        hardware = members[0].samples.hardware
        about = {
            **dict.fromkeys(("arch", "os", "ram"), "unknown"),
            "machine": machine,
            "cpu": hardware.device,
            "num_cpu": str(hardware.count),
        }
        files[f"results/{machine}/machine.json"] = _json({**about, "version": 1})
        environment = f"existing-py{python}"
        started = min(_epoch_milliseconds(one.utc) for one in members)
        results = {}
        for one, measure in _all(members):
            name = f"{one.file}.{measure.metric.name}"
            benchmarks[name] = _asv_benchmark(name, measure.metric.unit)
            row = [[measure.value], [], "1", started, *[None] * 7, [list(measure.values)]]
            results[name] = row
        document = {
            "commit_hash": commit,
            "env_name": environment,
            "date": started,
            "params": {**about, "python": python},
            "python": python,
            "requirements": {},
            "env_vars": {},
            "result_columns": _ASV_COLUMNS,
            "results": results,
            "durations": {},
            "version": _ASV_VERSION,
        }
        files[f"results/{machine}/{commit[:8]}-{environment}.json"] = _json(document)
    return files | {"results/benchmarks.json": _json(benchmarks)} if files else {}


def _asv_benchmark(name: str, unit: str) -> dict[str, Any]:
    return {
        "code": name,
        "name": name,
        "param_names": [],
        "params": [],
        "timeout": 60.0,
        "type": "track",
        "unit": unit or "1",
        "version": "1",
    }


def _epoch_milliseconds(utc: str) -> int:
    return round(datetime.fromisoformat(utc).timestamp() * 1e3)


def _all(found: Iterable[Exported]) -> Iterator[tuple[Exported, Measure]]:
    return ((one, measure) for one in found for measure in one.measures())


def _plain(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


FORMS: Final[Mapping[str, Callable[[Sequence[Exported]], dict[str, str]]]] = {
    "golden": golden,
    "torchtitan": torchtitan,
    "pytorch": pytorch,
    "bencher": bencher,
    "github-action-benchmark": github_action_benchmark,
    "asv": asv,
}
"""Name -> files by path below the folder; none where nothing can be written in this form."""
