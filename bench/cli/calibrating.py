"""`baseline noise`: an A/A calibration of this machine, or a look at those that are there."""

from __future__ import annotations

import json
from pathlib import Path

from bench.cli import console, exit_codes, running
from bench.cli.answer import Answer
from bench.cli.chosen_sweep import choose
from bench.cli.options import SweepRequest
from bench.cli.verbs.judge import NoiseRequest
from bench.errors import UsageError
from bench.launch.arm.request import ArmRequest
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from reports.gates.gate_table import interval_text
from reports.gates.noise import FEWEST_BLOCKS, NoiseCalibration, calibrate
from reports.gates.pairing import sides_of_arms
from reports.renderers import quantity

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
