"""`baseline save | list | promote | noise`: what gates compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cli import console, exit_codes, running
from bench.cli.chosen_sweep import choose
from bench.cli.console import Answer
from bench.cli.gating import baseline_of_file, load_baseline
from bench.cli.options import SweepRequest
from bench.cli.verbs.judge import ListRequest, NoiseRequest, PromoteRequest, SaveRequest
from bench.errors import UsageError
from bench.launch.arm.prepare import ArmRequest
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from reports.compare.baseline import Baseline, make_baseline, promote, read_baseline
from reports.compare.noise import FEWEST_BLOCKS, NoiseCalibration, calibrate
from reports.compare.samples import imported_samples
from reports.compare.sides import samples_of, sides_of_arms
from reports.compare.text import interval_text
from reports.renderers import quantity


def save(asked: SaveRequest) -> Answer:
    """Keep the numbers of a sweep (of one of its arms), of an import or of a file, under a name.

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
    if asked.sweep not in store.sweeps() and Path(asked.sweep).is_file():
        return _written(store, baseline_of_file(name, Path(asked.sweep)))
    if asked.sweep in store.imports.ids():
        run = imported_samples(store.imports.read(asked.sweep))
        return _written(store, make_baseline(name, asked.sweep, utc_now(), [run]))
    called = store.sweeps_called(asked.sweep)
    sweep = called[0] if len(called) == 1 else asked.sweep
    cells = samples_of(store, sweep, asked.arm)
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


ARMS = (ArmRequest("a"), ArmRequest("b"))
"""The working tree twice: whatever differs between the two is noise."""


def run_noise(asked: NoiseRequest) -> Answer:
    """Run every cell of a sweep in interleaved A/A blocks and keep what they differ by.

    Raises:
        UsageError: the sweep is wrong, or too few blocks are asked for.
        NothingMeasuredError: too few blocks gave a steady time.
    """
    if asked.sweep is None:
        return _kept(asked.results)
    if asked.repeat < FEWEST_BLOCKS:
        raise UsageError(
            f"--repeat: expected at least {FEWEST_BLOCKS} blocks (fewer give no interval), found "
            f"{asked.repeat}"
        )
    request = SweepRequest(sweep=asked.sweep, cells=asked.cells, repeat=asked.repeat)
    sweep = choose(request)
    store = ResultsStore.open(asked.results, create=True)
    sweep = sweep.with_arms(f"{sweep.id}-noise", ARMS).prepared(store)
    outcome = running.run_to_judge(sweep, store)
    pairs = sides_of_arms(store, sweep.id, "a", "b").pairs
    found = calibrate(
        [(pair.base, pair.head) for pair in pairs], sweep=sweep.id, measured_utc=utc_now()
    )
    text = json.dumps(found.to_document(), indent=2, ensure_ascii=False) + "\n"
    path = store.noise.write(found.hardware.slug, text)
    return _shown([found], running.outcome_code(sweep.chosen, outcome), (f"kept in {path}",))


def _kept(results: Path) -> Answer:
    """Every calibration of the results folder."""
    store = ResultsStore.open(results, create=False)
    names = store.noise.names()
    none = () if names else ("no noise calibration; `baseline noise SWEEP.yaml` makes one",)
    kept = [NoiseCalibration.from_document(store.noise.read(name)) for name in names]
    return _shown(kept, remarks=none)


def _shown(
    found: list[NoiseCalibration], code: int = exit_codes.OK, remarks: tuple[str, ...] = ()
) -> Answer:
    return Answer(
        lambda: {"calibrations": [one.to_document() for one in found]},
        lambda: "\n".join(map(_text, found)),
        code,
        remarks,
    )


def _text(one: NoiseCalibration) -> str:
    rows = [
        (
            cell.cell,
            cell.metric,
            str(cell.blocks),
            quantity.change(cell.change),
            interval_text((1 + cell.low, 1 + cell.high)),
            quantity.share(cell.floor),
        )
        for cell in one.cells
    ]
    head = ("cell", "metric", "blocks", "A/A change", "95 % interval", "floor")
    table = console.columns(head, rows, left=2)
    return f"{one.hardware.describe()}: {one.describe()}\n\n{table}"
