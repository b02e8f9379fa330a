"""`baseline save | list | promote`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.cli import console
from bench.cli.answer import Answer
from bench.cli.gating import load_baseline
from bench.cli.verbs.judge import ListRequest, PromoteRequest, SaveRequest
from bench.errors import UsageError
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from reports.gates.baseline import Baseline, make_baseline, promote, read_baseline
from reports.gates.cell_samples import cell_samples
from reports.gates.pairing import cells_of


def save(asked: SaveRequest) -> Answer:
    """Keep the numbers of a sweep (of one of its arms) under a new name.

    Raises:
        UsageError: the name is taken, or the sweep is unknown.
        NothingMeasuredError: no finished run.
        NotComparableError: the cells were measured on different hardware.
    """
    store, name = ResultsStore.open(asked.results, create=False), asked.name
    if store.baselines.path(name).exists():
        raise UsageError(
            f"baseline {name!r} exists and is not overwritten: save under another name, then "
            f"`mfsdp-bench baseline promote OTHER {name}`"
        )
    called = store.sweeps_called(asked.sweep)
    sweep = called[0] if len(called) == 1 else asked.sweep
    cells = [cell_samples(cell) for cell in cells_of(store, sweep, asked.arm) if cell.finished]
    return _written(store, make_baseline(name, sweep, utc_now(), cells))


def show_list(asked: ListRequest) -> Answer:
    """Every baseline of the results folder."""
    store = ResultsStore.open(asked.results, create=False)
    kept = [
        _facts(read_baseline(store.baselines.read(name), f"baseline {name}"))
        for name in store.baselines.names()
    ]
    return Answer(lambda: {"baselines": kept}, lambda: _table(kept))


def _table(kept: Sequence[Mapping[str, object]]) -> str:
    if not kept:
        return "no baseline; `mfsdp-bench baseline save NAME SWEEP` makes one"
    return console.columns(list(kept[0]), [tuple(map(str, one.values())) for one in kept])


def promote_to(asked: PromoteRequest) -> Answer:
    """Let a candidate (a name or a file) take the place of a baseline.

    Raises:
        UsageError: no such candidate, or a name that cannot be one.
        NotComparableError: other hardware, configurations or schema.
    """
    store, name = ResultsStore.open(asked.results, create=False), asked.name
    new = load_baseline(store, asked.candidate)
    document = store.baselines.find(name)
    current = None if document is None else read_baseline(document, f"baseline {name}")
    return _written(store, promote(new, current, name))


def _written(store: ResultsStore, baseline: Baseline) -> Answer:
    path = str(store.baselines.write(baseline.name, baseline.to_text()))
    return Answer(lambda: {"path": path, **_facts(baseline)}, lambda: path)


def _facts(baseline: Baseline) -> dict[str, object]:
    runs = [len(cell.step_milliseconds) for cell in baseline.cells]
    return {
        "name": baseline.name,
        "sweep": baseline.sweep,
        "cells": len(baseline.cells),
        "runs": f"{min(runs)} to {max(runs)}" if min(runs) != max(runs) else runs[0],
        "saved": baseline.saved_utc[:10],
        "commit": baseline.commit[:12] or "unknown",
        "hardware": baseline.hardware.describe(),
    }
