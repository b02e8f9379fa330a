"""`baseline noise | save | list | promote`: what gates compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.gate import baseline_of_file, load_baseline
from bench.cli.verb import Answer, CellOptions, ResultsOption, argument, columns, option
from bench.errors import UsageError
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from reports.compare.baseline import Baseline
    from reports.compare.noise import NoiseCalibration


class NoiseVerb(CellOptions, ResultsOption, name="baseline noise"):
    """Measure how far equal code seems to differ here (A/A).

    Without SWEEP, show what has been measured before.

    Examples:
        baseline noise quickstart
        baseline noise
    """

    sweep: Path | None = argument("SWEEP", "What to calibrate with; none: show.", None)
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
        noise = calibrate(pairs, sweep=sweep.id, measured_utc=utc_now())
        text = json.dumps(noise.to_document(), indent=2, ensure_ascii=False) + "\n"
        path = store.noise.write(noise.hardware.slug, text)
        return _calibrations([noise], outcome_code(sweep.chosen, outcome), f"kept in {path}")

    def _kept(self) -> Answer:
        """Every calibration of the results folder."""
        from reports.compare.noise import NoiseCalibration

        store = self.store()
        kept = [NoiseCalibration.from_document(store.noise.read(n)) for n in store.noise.names()]
        if kept:
            return _calibrations(kept)
        return _calibrations(
            kept, exit_codes.OK, "no noise calibration; `baseline noise SWEEP.yaml` makes one"
        )


def _calibrations(
    calibrations: Sequence[NoiseCalibration], code: int = exit_codes.OK, *remarks: str
) -> Answer:
    from reports.compare.text import interval_text

    titles = ("cell", "metric", "blocks", "A/A change", "95 % interval", "floor")
    document: list[Block] = []
    for noise in calibrations:
        rows = [
            (
                cell.cell,
                cell.metric,
                str(cell.blocks),
                quantity.change(cell.change),
                interval_text((1 + cell.low, 1 + cell.high)),
                quantity.share(cell.floor),
            )
            for cell in noise.cells
        ]
        document.append(Paragraph(f"{noise.hardware.describe()}: {noise.describe()}"))
        document.append(columns(titles, rows, left=2))
    data = {"calibrations": [noise.to_document() for noise in calibrations]}
    return Answer(document, data, code, remarks)


class SaveVerb(ResultsOption, name="baseline save"):
    """Keep the numbers of a sweep, or of another project's file, as a small JSON file.

    Examples:
        baseline save main nightly
        baseline save golden golden_values_dev_dgx_h100.json
    """

    name: str = argument("NAME", "A new name.")
    sweep: str = argument("SWEEP|FILE", "A sweep that was run, or a file that `import` reads.")
    arm: str | None = option("--arm ARM", "One arm of it.")

    def run(self) -> Answer:
        """Where it was written."""
        from bench.store.run_folder import utc_now
        from reports.compare.baseline import make_baseline
        from reports.compare.samples import imported_samples
        from reports.compare.sides import samples_of

        store, sweep = self.store(create=(is_file := Path(self.sweep).is_file())), self.sweep
        if store.baselines.path(self.name).exists():
            raise UsageError(
                f"baseline {self.name!r} exists and is not overwritten: save under another name,"
                f" then `mfsdp-bench baseline promote OTHER {self.name}`"
            )
        if sweep not in store.sweeps() and is_file:
            return _written(store, baseline_of_file(self.name, Path(sweep)))
        if sweep in store.imports.ids():
            cells = [imported_samples(store.imports.read(sweep))]
        else:
            sweep = store.only_called(sweep)
            cells = samples_of(store, sweep, self.arm)
        return _written(store, make_baseline(self.name, sweep, utc_now(), cells))


class ListVerb(ResultsOption, name="baseline list"):
    """Show every baseline with its date and hardware.

    Examples:
        baseline list
    """

    def run(self) -> Answer:
        """A row of each."""
        from reports.compare.baseline import read_baseline

        store = self.store()
        kept = [
            _facts(read_baseline(store.baselines.read(name), f"baseline {name}"))
            for name in store.baselines.names()
        ]
        if not kept:
            hint = "no baseline; `mfsdp-bench baseline save NAME SWEEP` makes one"
            return Answer([Paragraph(hint)], {"baselines": []})
        rows = [tuple(map(str, facts.values())) for facts in kept]
        return Answer([columns(list(kept[0]), rows)], {"baselines": kept})


class PromoteVerb(ResultsOption, name="baseline promote"):
    """Let one baseline take the place of another.

    Examples:
        baseline promote candidate main
    """

    candidate: str = argument("CANDIDATE", "A baseline, or its file.")
    name: str = argument("NAME", "The name it takes over.")

    def run(self) -> Answer:
        """Where it was written; refused for other hardware, configurations or schema."""
        from reports.compare.baseline import promote, read_baseline

        store = self.store()
        new = load_baseline(store, self.candidate)
        document = store.baselines.find(self.name)
        current = None if document is None else read_baseline(document, f"baseline {self.name}")
        return _written(store, promote(new, current, self.name))


def _written(store: ResultsStore, baseline: Baseline) -> Answer:
    path = str(store.baselines.write(baseline.name, baseline.to_text()))
    return Answer([Paragraph(path)], {"path": path, **_facts(baseline)})


def _facts(baseline: Baseline) -> dict[str, object]:
    runs = [len(cell.values.get("step_time", ())) for cell in baseline.cells]
    return {
        "name": baseline.name,
        "sweep": baseline.sweep,
        "cells": len(baseline.cells),
        "runs": f"{min(runs)} to {max(runs)}" if min(runs) != max(runs) else runs[0],
        "saved": baseline.saved_utc[:10],
        "commit": baseline.commit[:12] or "unknown",
        "hardware": baseline.hardware.describe(),
    }
