"""What `fit` predicts beside what real ranks of this machine hold and send.

python -m tools.fit_accuracy sweep fit.yaml        a pairwise design of profiled runs
mfsdp-bench run fit.yaml --results out             minutes; goes on where it was stopped
python -m tools.fit_accuracy table out             the rows, worst first, as Markdown

A pair of values that no cell may have is left out. Peaks are those of torch's CPU allocator in the
first three steps, set-up apart; bytes are those of the last step of rank 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

from bench.errors import ConfigError, UnsupportedError
from bench.fit.prediction import predict
from bench.record import RunRecord
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.store.results_store import ResultsStore
from sweeps.settings import run_spec

_FP32_MAIN: Final = {"dtypes.main_params": "fp32", "dtypes.main_grads": "fp32"}
_STRATEGIES: Final = {"zero0": "no_shard", "zero1": "optim", "zero2": "optim_grads"}
_HYBRIDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": {},
    "-hsdp": {"engine.outer_size": 2, "engine.outer_strategy": "no_shard"},
    "-hfsdp": {"engine.outer_size": 2, "engine.outer_strategy": "optim"},
}
_FACTORS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "engine": {
        f"{name}-{zero}{suffix}": {"engine.name": name, "engine.strategy": strategy, **hybrid}
        for name in ("mfsdp", "fsdp2", "ddp")
        for zero, strategy in (*_STRATEGIES.items(), ("zero3", "optim_grads_params"))
        for suffix, hybrid in _HYBRIDS.items()
    },
    "dtypes": {
        "fp32": {"dtypes.compute": "fp32", **_FP32_MAIN},
        "bf16": {"dtypes.compute": "bf16", **_FP32_MAIN},
        "sent16": {"dtypes.compute": "bf16", **_FP32_MAIN, "dtypes.grad_comm": "bf16"},
        "main16": {"dtypes.compute": "bf16", "dtypes.main_params": None},
    },
    "recompute": {
        "all": {"model.recompute": "none"},
        "sel": {"model.recompute": "selective"},
        "full": {"model.recompute": "full"},
    },
    "allocator": {
        "own": {},
        "resize": {"engine.allocator": "storage_resize"},
        "temp": {"engine.allocator": "temporary"},
        "fixed": {"engine.allocator": "fixed_pool"},
        "max": {"engine.allocator": "max_pool"},
    },
    "microbatches": {"1": {"of": 1}, "3": {"of": 3}},
    "ranks": {"2": {"launch.ranks": 2}, "4": {"launch.ranks": 4}},
}
_BASE: Final = {
    "model.preset": "debug",
    "model.layers": 5,
    "train.steps": 3,
    "train.micro_batch": 2,
    "train.seq_len": 128,
    "measure.profile": "memory",
}
_MIB: Final = 1 << 20


def _settings(levels: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(_BASE)
    for factor, level in levels.items():
        found |= _FACTORS[factor][level]
    shares = found["launch.ranks"] * found["train.micro_batch"]
    return found | {"train.global_batch": shares * found.pop("of")}


def _may_run(levels: Mapping[str, str], machine: Machine) -> bool:
    if levels["engine"].startswith("mfsdp") == (levels["allocator"] == "own"):
        return False
    try:
        resolve(run_spec(_settings(levels)), machine)
    except (ConfigError, UnsupportedError):
        return False
    return True


def _design() -> Iterator[dict[str, str]]:
    """Greedy: the cell with the most new pairs, of several the one of least used values."""
    machine = Machine.detect()
    cells = [dict(zip(_FACTORS, one, strict=True)) for one in product(*_FACTORS.values())]
    pairs = {
        index: set(combinations(sorted(cell.items()), 2))
        for index, cell in enumerate(cells)
        if _may_run(cell, machine)
    }
    missing = set().union(*pairs.values())
    used: Counter[tuple[str, str]] = Counter()
    while missing:
        best = max(
            pairs,
            key=lambda index: (
                len(pairs[index] & missing),
                -sum(used[one] for one in cells[index].items()),
            ),
        )
        missing -= pairs[best]
        used.update(cells[best].items())
        yield cells[best]


def _write_sweep(path: Path) -> None:
    cells = [{"label": "-".join(levels.values()), **_settings(levels)} for levels in _design()]
    document = {"name": "fit-accuracy", "matrix": {"include": cells}}
    path.write_text(json.dumps(document, indent=1))
    sys.stderr.write(f"{len(cells)} cells\n")


def _row(record: RunRecord) -> tuple[float, str]:
    found = predict(record.resolved, whole=True)
    measured = (record.memory or {})["cpu_allocator_steps_peak_bytes"]
    error = found.peak_bytes / measured - 1
    sent = record.steps[0][-1].wire_bytes
    wire = "equal" if sent == found.wire_bytes else f"{sent:,} for {found.wire_bytes:,}"
    cells = (
        record.status.cell,
        f"{found.peak_bytes / _MIB:.2f}",
        f"{measured / _MIB:.2f}",
        f"{error:+.2%}",
        f"{found.wire_bytes:,}",
        wire,
    )
    return abs(error), f"| {' | '.join(map(str, cells))} |"


def _print_table(results: Path) -> None:
    records = ResultsStore.open(results, create=False).records()
    newest = {record.status.cell: record for record in records if record.is_whole}
    rows = sorted(map(_row, newest.values()))
    print("| cell | predicted MiB | measured MiB | error | bytes sent | measured |")
    print("|---|---:|---:|---:|---:|---|")
    print("\n".join(text for _, text in reversed(rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sweep", "table"))
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    {"sweep": _write_sweep, "table": _print_table}[arguments.what](arguments.path)
