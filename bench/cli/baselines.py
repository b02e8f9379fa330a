"""`baseline save | list | promote`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.gating import load_baseline
from bench.errors import UsageError
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from reports.gates.baseline import Baseline, make_baseline, promote, read_baseline
from reports.gates.cell_samples import cell_samples
from reports.gates.noise import age_in_words
from reports.gates.pairing import cells_of


def save(results: Path, name: str, sweep: str, *, arm: str | None, as_json: bool) -> int:
    """Keep the numbers of `sweep` (of one of its arms) under a new name.

    Raises:
        UsageError: the name is taken, or the sweep is unknown.
        NothingMeasuredError: no finished run.
        NotComparableError: the cells were measured on different hardware.
    """
    store = ResultsStore.open(results, create=False)
    if store.baselines.path(name).exists():
        raise UsageError(
            f"baseline {name!r} exists and is not overwritten: save under another name, then "
            f"`mfsdp-bench baseline promote OTHER {name}`"
        )
    called = store.sweeps_called(sweep)
    sweep = called[0] if len(called) == 1 else sweep
    cells = [cell_samples(cell) for cell in cells_of(store, sweep, arm) if cell.finished]
    baseline = make_baseline(name, sweep, utc_now(), cells)
    return _write(store, baseline, as_json=as_json)


def show_list(results: Path, *, as_json: bool) -> int:
    """Print every baseline of the results folder."""
    store = ResultsStore.open(results, create=False)
    kept = [
        read_baseline(store.baselines.read(name), f"baseline {name}")
        for name in store.baselines.names()
    ]
    if as_json:
        console.data_json({"baselines": [_facts(baseline) for baseline in kept]})
    elif not kept:
        console.data("no baseline; `mfsdp-bench baseline save NAME SWEEP` makes one")
    else:
        head = ("name", "sweep", "cells", "runs", "saved", "commit", "hardware")
        rows = [tuple(str(value) for value in _facts(one).values()) for one in kept]
        console.data(console.columns(head, rows))
    return exit_codes.OK


def promote_to(results: Path, candidate: str, name: str, *, why: str, as_json: bool) -> int:
    """Let `candidate` (a name or a file) take the place of `name`, and write that into it.

    Raises:
        UsageError: no such candidate, or a name that cannot be one.
        NotComparableError: other hardware, configurations or schema.
    """
    store = ResultsStore.open(results, create=False)
    new = load_baseline(store, candidate)
    document = store.baselines.find(name)
    current = None if document is None else read_baseline(document, f"baseline {name}")
    return _write(store, promote(new, current, name, utc_now(), why), as_json=as_json)


def _write(store: ResultsStore, baseline: Baseline, *, as_json: bool) -> int:
    path = store.baselines.write(baseline.name, baseline.to_text())
    if as_json:
        console.data_json({"path": str(path), **_facts(baseline)})
    else:
        console.data(str(path))
    return exit_codes.OK


def _facts(baseline: Baseline) -> dict[str, object]:
    saved = datetime.fromisoformat(baseline.saved_utc)
    age = (datetime.now(UTC) - saved).total_seconds() / 86_400
    runs = [len(cell.step_milliseconds) for cell in baseline.cells]
    return {
        "name": baseline.name,
        "sweep": baseline.sweep,
        "cells": len(baseline.cells),
        "runs": f"{min(runs)} to {max(runs)}" if min(runs) != max(runs) else runs[0],
        "saved": f"{baseline.saved_utc[:10]} ({age_in_words(age)})",
        "commit": baseline.commit[:12] or "unknown",
        "hardware": baseline.hardware.describe(),
    }
