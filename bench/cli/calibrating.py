"""`noise`: an A/A calibration of this machine, or a look at those that are there."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench.cli import console, exit_codes, running
from bench.cli.arm_preparation import prepared_sides
from bench.cli.planning import Request, RequestedPlan, requested_plan
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


def run_noise(request: Request, results: Path, *, as_json: bool) -> int:
    """Run every cell of the sweep in interleaved A/A blocks and keep what they differ by.

    Raises:
        UsageError: the sweep is wrong, or too few blocks are asked for.
        NothingMeasuredError: too few blocks gave a steady time.
    """
    if request.repeat is not None and request.repeat < FEWEST_BLOCKS:
        raise UsageError(
            f"--repeat: expected at least {FEWEST_BLOCKS} blocks (fewer give no interval), found "
            f"{request.repeat}"
        )
    plans = _a_against_a(requested_plan(request))
    store = ResultsStore.open(results, create=True)
    plans, sides = prepared_sides(plans, store)
    outcome = running.run_planned(plans, sides, store, running.Options(results))
    if outcome.interrupted:
        return exit_codes.INTERRUPTED
    for line in running.closing_lines(plans.chosen, outcome):
        console.note(line)
    pairs = sides_of_arms(store, plans.chosen.id, "a", "b").pairs
    found = calibrate(
        [(pair.base, pair.head) for pair in pairs], sweep=plans.chosen.id, measured_utc=utc_now()
    )
    text = json.dumps(found.to_document(), indent=2, ensure_ascii=False) + "\n"
    path = store.noise.write(found.hardware.slug, text)
    console.note(f"kept in {path}")
    _show([found], as_json=as_json)
    return running.outcome_code(plans.chosen, outcome)


def show_noise(results: Path, *, as_json: bool) -> int:
    """Print every calibration of the results folder with its age."""
    store = ResultsStore.open(results, create=False)
    names = store.noise.names()
    _show([NoiseCalibration.from_document(store.noise.read(n)) for n in names], as_json=as_json)
    if not names:
        console.note("no noise calibration; `mfsdp-bench noise SWEEP.yaml` makes one")
    return exit_codes.OK


def _a_against_a(plans: RequestedPlan) -> RequestedPlan:
    whole = replace(plans.whole, id=f"{plans.whole.id}-noise", interleaved=True)
    chosen = replace(plans.chosen, id=whole.id, interleaved=True)
    return replace(plans, whole=whole, chosen=chosen, arms=ARMS)


def _show(found: list[NoiseCalibration], *, as_json: bool) -> None:
    now = datetime.now(UTC)
    if as_json:
        documents = [one.to_document() | {"age_days": one.age_days(now)} for one in found]
        console.data_json({"calibrations": documents})
        return
    for one in found:
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
        head = "cell | metric | blocks | A/A change | 95 % interval | floor"
        console.data(f"{one.hardware.describe()}: {one.describe(now)}\n")
        console.data(console.columns(head.split(" | "), rows, left=2))
