"""`baseline save | list | promote`: what gates compare with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli.completion import offer_kept
from bench.cli.gate import baseline_of_file, load_baseline
from bench.cli.verb import Answer, ResultsOption, argument, columns, option
from bench.errors import UsageError
from reports.renderers.document import Paragraph

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from reports.compare.baseline import Baseline


class SaveVerb(ResultsOption, name="baseline save"):
    """Keep the numbers of a sweep, or of another project's file, as a small JSON file.

    Examples:
        baseline save main nightly
        baseline save golden golden_values_dev_dgx_h100.json
    """

    name: str = argument("NAME", "A new name.")
    sweep: str = argument(
        "SWEEP|FILE", "A sweep that was run, or a file that `import` reads.", offer=offer_kept
    )
    arm: str | None = option("--arm ARM", "One arm of it.")

    def run(self) -> Answer:
        """Where it was written."""
        from bench.store.run_folder import utc_now
        from reports.compare.baseline import make_baseline
        from reports.compare.samples import imported_samples
        from reports.compare.sides import samples_of

        store, sweep = self.store(), self.sweep
        if store.baselines.path(self.name).exists():
            raise UsageError(
                f"baseline {self.name!r} exists and is not overwritten: save under another name,"
                f" then `mfsdp-bench baseline promote OTHER {self.name}`"
            )
        if sweep not in store.sweeps() and Path(sweep).is_file():
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
        rows = [tuple(map(str, one.values())) for one in kept]
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
