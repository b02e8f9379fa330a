"""`baseline noise`: how far equal code seems to differ on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.completion import offer_definitions
from bench.cli.verb import Answer, CellOptions, ResultsOption, argument, columns, option
from bench.errors import UsageError
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph

if TYPE_CHECKING:
    from reports.compare.noise import NoiseCalibration


class NoiseVerb(CellOptions, ResultsOption, name="baseline noise"):
    """Measure how far equal code seems to differ here (A/A).

    Without SWEEP, show what has been measured before.

    Examples:
        baseline noise quickstart
        baseline noise
    """

    sweep: Path | None = argument(
        "SWEEP", "What to calibrate with; none: show.", None, offer_definitions
    )
    repeat: int = option("--repeat N", "Blocks of two runs per cell.", 10, min=1, max=1000)

    def run(self) -> Answer:
        """Run every cell in interleaved blocks of the working tree twice: 3 without a number."""
        if self.sweep is None:
            return self._kept()
        from bench.cli.run import outcome_code, run_to_judge
        from bench.launch.arms import ArmRequest
        from bench.store.run_folder import utc_now
        from reports.compare.noise import FEWEST_BLOCKS, calibrate
        from reports.compare.sides import sides_of_arms

        if self.repeat < FEWEST_BLOCKS:
            raise UsageError(
                f"--repeat: expected at least {FEWEST_BLOCKS} blocks (fewer give no interval),"
                f" found {self.repeat}"
            )
        sweep = self.select(self.sweep, repeat=self.repeat)
        store = self.store(create=True)
        arms = (ArmRequest("a"), ArmRequest("b"))
        sweep = sweep.with_arms(f"{sweep.id}-noise", arms).prepared(store, console.note)
        outcome = run_to_judge(sweep, store)
        pairs = sides_of_arms(store, sweep.id, "a", "b").pairs
        found = calibrate(pairs, sweep=sweep.id, measured_utc=utc_now())
        text = json.dumps(found.to_document(), indent=2, ensure_ascii=False) + "\n"
        path = store.noise.write(found.hardware.slug, text)
        return _answer([found], outcome_code(sweep.chosen, outcome), f"kept in {path}")

    def _kept(self) -> Answer:
        """Every calibration of the results folder."""
        from reports.compare.noise import NoiseCalibration

        store = self.store()
        kept = [NoiseCalibration.from_document(store.noise.read(n)) for n in store.noise.names()]
        if kept:
            return _answer(kept)
        return _answer(
            kept, exit_codes.OK, "no noise calibration; `baseline noise SWEEP.yaml` makes one"
        )


def _answer(found: Sequence[NoiseCalibration], code: int = exit_codes.OK, *remarks: str) -> Answer:
    from reports.compare.text import interval_text

    titles = ("cell", "metric", "blocks", "A/A change", "95 % interval", "floor")
    document: list[Block] = []
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
        document.append(Paragraph(f"{one.hardware.describe()}: {one.describe()}"))
        document.append(columns(titles, rows, left=2))
    data = {"calibrations": [one.to_document() for one in found]}
    return Answer(document, data, code, remarks)
