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
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any, Final, NamedTuple

from bench.derive.metrics import CURVES, GRAD_NORM, LOSS, Metric, judged_metrics
from bench.derive.summary import common_steps, step_milliseconds
from bench.store import ResultsStore
from bench.workload import ImportedStep, Workload
from reports.compare.parity import losses
from reports.compare.samples import CellSamples, cell_samples, imported_samples
from reports.compare.series import stated_steps
from reports.compare.statistics import Interval, Rearrangements, subset_means
from reports.views.cells import Cell
from reports.views.machine import entries
from reports.views.sweep_view import load_sweeps

_ALPHA: Final = 0.05
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")
_ASV_COLUMNS: Final = [
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"),
]
_ASV_BENCHMARK: Final = {
    "param_names": [],
    "params": [],
    "timeout": 60.0,
    "type": "track",
    "unit": "1",
    "version": "1",
}
# Name in Megatron-LM's files -> (field of a step, factor into its unit).
_GOLDEN: Final = {
    "lm loss": ("loss", 1),
    "grad-norm": ("grad_norm", 1),
    "mem-allocated-bytes": ("device_allocated_bytes", 1),
    "mem-max-allocated-bytes": ("device_peak_bytes", 1),
    "iteration-time": ("milliseconds", 1e-3),
}


class Measure(NamedTuple):
    """One metric of one cell: a number per run, their median and the interval of their centre.

    interval: at 95 %, of values that are symmetric around it; None of too few runs.
    """

    metric: Metric
    values: tuple[float, ...]
    value: float
    interval: Interval | None


class Exported(NamedTuple):
    """A cell of a sweep, or an imported run. steps: of its first finished run.

    commit: 40 digits, "" if its code is of no commit. utc: when its first run began.
    """

    name: str
    workload: Workload
    samples: CellSamples
    steps: tuple[ImportedStep, ...]
    utc: str
    commit: str = ""
    python: str = ""
    hostname: str = "unknown"

    @property
    def file(self) -> str:
        """Its name as a part of a file name."""
        return _NOT_PLAIN.sub("-", self.name).strip("-.")


_Files = dict[str, str]


def exported(store: ResultsStore, names: Sequence[str]) -> list[Exported]:
    """Finished cells of the sweeps, and the imports, of these names; of all where none is given."""
    sweeps = [name for name in store.sweeps() if not names or name in names]
    views = load_sweeps(store, sweeps) if sweeps else []
    cells = [_of_cell(view.id, cell) for view in views for cell in view.cells if cell.finished]
    runs = [store.imports.read(name) for name in store.imports.ids() if not names or name in names]
    return cells + [
        Exported(
            run.id, run.workload, imported_samples(run), run.steps, run.provenance.imported_utc
        )
        for run in runs
    ]


def _of_cell(sweep: str, cell: Cell) -> Exported:
    record = cell.finished[0].record
    git = entries(record.environment, "git")
    commit = "" if git.get("dirty") else str(git.get("commit") or "")
    # Times of the slowest rank, losses and norms as means over ranks.
    times = step_milliseconds(common_steps(record.steps))
    curves = (losses(record, name).values() for name in CURVES)
    rows = itertools.islice(itertools.zip_longest(times, *curves), len(times))
    return Exported(
        f"{sweep}/{cell.name}",
        record.workload,
        cell_samples(cell),
        tuple(
            ImportedStep(number, milliseconds=time, loss=loss, grad_norm=norm)
            for number, (time, loss, norm) in enumerate(rows, start=1)
        ),
        record.status.started_utc,
        commit if _COMMIT.fullmatch(commit) else "",
        str(record.runtime.get("python") or ""),
        str(record.environment.get("hostname") or "unknown"),
    )


def _measures(runs: Sequence[Exported]) -> Iterator[tuple[Exported, Measure]]:
    """Of every judged metric that was measured, then the last loss and gradient norm."""
    known = judged_metrics()
    for run in runs:
        numbers = {known[n]: tuple(v.values()) for n, v in run.samples.values.items() if n in known}
        for metric in (LOSS, GRAD_NORM):
            curves = run.samples.curves.get(metric.name, ())
            last = (curve.values[-1] for curve in curves if curve.values)
            numbers[metric] = tuple(filter(math.isfinite, last))
        for metric, values in numbers.items():
            if values:
                interval = Rearrangements(subset_means(values)).interval(_ALPHA)
                yield run, Measure(metric, values, median(values), interval)


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _golden(runs: Sequence[Exported]) -> _Files:
    """Every step; what a step does not tell is `nan`, as Megatron-LM writes it.

    A loss or norm that it does not tell is left out, since `nan` is one that diverged.
    """
    files = {}
    for run in runs:
        numbers = [step.step for step in run.steps]
        gaps = {after - before for before, after in itertools.pairwise(numbers)}
        document = {}
        for metric, (field, factor) in _GOLDEN.items():
            stated = stated_steps(run.steps, field)
            steps = stated if field in CURVES else numbers
            if stated:
                document[metric] = {
                    "start_step": numbers[0],
                    "end_step": numbers[-1],
                    "step_interval": min(gaps, default=1),
                    "values": {
                        str(step): value if math.isfinite(value) else str(value)
                        for step in steps
                        for value in (stated.get(step, math.nan) * factor,)
                    },
                }
        if run.steps:
            files[f"golden_values_{run.file}.json"] = _json(document)
    return files


def _torchtitan(runs: Sequence[Exported]) -> _Files:
    """Runs with losses; the third column where every step has a norm."""
    files = {}
    for run in runs:
        steps = [step for step in run.steps if step.loss is not None]
        normed = all(step.grad_norm is not None for step in steps)
        lines = [f"# config: {run.name}"]
        lines += [] if run.workload.ranks is None else [f"# ngpu: {run.workload.ranks}"]
        lines.append("# step loss" + (" grad_norm" if normed else ""))
        for step in steps:
            lines.append(f"{step.step} {step.loss!r}" + (f" {step.grad_norm!r}" if normed else ""))
        if steps:
            files[f"{run.file}.txt"] = "\n".join([*lines, ""])
    return files


def _pytorch(runs: Sequence[Exported]) -> _Files:
    """One record per cell and metric, a value per run."""
    records = [
        {
            "benchmark": {
                "name": "mfsdp-bench",
                "mode": "training",
                "dtype": run.workload.compute_dtype or "unknown",
                "extra_info": _plain({"cell": run.name, "strategy": run.workload.strategy}),
            },
            "model": {
                "name": run.workload.model or "unknown",
                "type": "training",
                "backend": run.workload.engine or run.workload.framework,
            },
            "metric": {
                "name": measure.metric.name,
                "benchmark_values": list(measure.values),
                "extra_info": _plain({"unit": measure.metric.unit, "commit": run.commit}),
            },
        }
        for run, measure in _measures(runs)
    ]
    return {"pytorch.json": _json(records)} if records else {}


def _plain(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _bencher(runs: Sequence[Exported]) -> _Files:
    """Bounds where so many runs give an interval."""
    document: dict[str, dict[str, dict[str, float]]] = {}
    for run, measure in _measures(runs):
        numbers = {"value": measure.value}
        if measure.interval is not None:
            numbers["lower_value"], numbers["upper_value"] = measure.interval
        document.setdefault(run.name, {})[measure.metric.name] = numbers
    return {"bencher.json": _json(document)} if document else {}


def _github_action_benchmark(runs: Sequence[Exported]) -> _Files:
    """For its tools customSmallerIsBetter and customBiggerIsBetter."""
    files: dict[str, list[dict[str, Any]]] = {}
    for run, measure in _measures(runs):
        metric = measure.metric
        entry: dict[str, Any] = {
            "name": f"{run.name}: {metric.name}",
            "unit": metric.unit or "1",
            "value": measure.value,
            "extra": f"{len(measure.values)} runs",
        }
        if measure.interval is not None:
            entry["range"] = "{:g} to {:g}".format(*measure.interval)
        is_bigger = metric.rule is not None and metric.rule.direction == "higher_is_better"
        files.setdefault("bigger.json" if is_bigger else "smaller.json", []).append(entry)
    return {file: _json(listed) for file, listed in files.items()}


def _asv(runs: Sequence[Exported]) -> _Files:
    """Cells whose code is a commit; machines are hosts."""
    files: _Files = {}
    benchmarks: dict[str, Any] = {"version": 2}
    grouped: dict[tuple[str, str, str], list[Exported]] = {}
    for run in runs:
        if run.commit:
            machine = _NOT_PLAIN.sub("-", run.hostname) or "unknown"
            grouped.setdefault((machine, run.commit, run.python or "unknown"), []).append(run)
    for (machine, commit, python), members in grouped.items():
        hardware = members[0].samples.hardware
        about = {
            **dict.fromkeys(("arch", "os", "ram"), "unknown"),
            "machine": machine,
            "cpu": hardware.device,
            "num_cpu": str(hardware.count),
        }
        started = min(_epoch_milliseconds(run.utc) for run in members)
        results = {}
        for run, measure in _measures(members):
            name = f"{run.file}.{measure.metric.name}"
            unit = measure.metric.unit or "1"
            benchmarks[name] = {"code": name, "name": name, **_ASV_BENCHMARK, "unit": unit}
            samples = [list(measure.values)]
            results[name] = [[measure.value], [], "1", started, *[None] * 7, samples]
        document = {
            "commit_hash": commit,
            "env_name": f"existing-py{python}",
            "date": started,
            "params": {**about, "python": python},
            "python": python,
            "requirements": {},
            "env_vars": {},
            "result_columns": _ASV_COLUMNS,
            "results": results,
            "durations": {},
            "version": 2,
        }
        files[f"results/{machine}/machine.json"] = _json({**about, "version": 1})
        files[f"results/{machine}/{commit[:8]}-existing-py{python}.json"] = _json(document)
    return files | {"results/benchmarks.json": _json(benchmarks)} if files else {}


def _epoch_milliseconds(utc: str) -> int:
    return round(datetime.fromisoformat(utc).timestamp() * 1e3)


FORMS: Final[Mapping[str, Callable[[Sequence[Exported]], _Files]]] = {
    "golden": _golden,
    "torchtitan": _torchtitan,
    "pytorch": _pytorch,
    "bencher": _bencher,
    "github-action-benchmark": _github_action_benchmark,
    "asv": _asv,
}
"""Name -> files by path below the folder; none where nothing can be written in this form."""
