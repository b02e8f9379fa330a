"""How far a sharded step is from its floor: `python -m benchmarks.floor SWEEP`.

    floor = step of one process alone with one rank's share of the batch
            x ranks that share a core
            + bytes that a rank sends / speed of a memory copy (measured now, one thread)

The step alone holds all of the arithmetic and none of the communication. Its optimizer updates
whole weights, a sharded one 1/n of them, so an engine may in principle undercut the floor of
a small model. Only cells with the dtypes of the cell `alone` have a floor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.derive.hardware import hardware_key
from bench.derive.metrics import STEP_TIME, WIRE_BYTES
from bench.errors import NothingMeasuredError
from bench.store import ResultsStore
from reports.renderers import quantity, terminal
from reports.renderers.table import Row, Table, columns
from reports.views.cells import Cell
from reports.views.sweep_view import load_sweeps

ALONE = "alone"
_COPY_BYTES = 64 * 2**20
_COPIES = 20


@dataclass(frozen=True)
class Floor:
    """Milliseconds of one step of a cell: as measured, and of its floor by part."""

    cell: str
    step_milliseconds: float
    compute_milliseconds: float
    transfer_milliseconds: float

    @property
    def milliseconds(self) -> float:
        """The floor."""
        return self.compute_milliseconds + self.transfer_milliseconds


def copy_bytes_per_second() -> float:
    """Bytes that one thread copies from memory to memory per second; best of several copies."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return _COPY_BYTES / best


def floors(cells: Sequence[Cell], copied_per_second: float) -> list[Floor]:
    """The floor of every measured cell with the dtypes of the cells named `alone` (of any arm).

    Raises:
        NothingMeasuredError: no cell of that name has a time.
    """
    alone = [cell for cell in cells if _name(cell) == ALONE and cell.measured]
    if not alone:
        raise NothingMeasuredError(f"no cell named {ALONE!r} has a steady time: no floor")
    times = [t for cell in alone for t in cell.values(STEP_TIME)]
    dtypes = alone[0].resolved.dtypes
    found = []
    for cell in cells:
        step, sent = cell.value(STEP_TIME), cell.value(WIRE_BYTES)
        if _name(cell) == ALONE or step is None or sent is None or cell.resolved.dtypes != dtypes:
            continue
        launch = cell.resolved.launch
        crowding = max(1.0, launch.ranks * launch.threads_per_rank / _cores(cell))
        transfer = sent / launch.ranks / copied_per_second * 1e3
        found.append(Floor(cell.name, step, median(times) * crowding, transfer * crowding))
    return found


def floor_table(found: Sequence[Floor]) -> Table:
    """One row per cell."""
    titles = ("cell", "step ms", "floor ms", "of it transfer ms", "step / floor")
    rows = [
        Row(
            (
                one.cell,
                f"{one.step_milliseconds:.1f}",
                f"{one.milliseconds:.1f}",
                f"{one.transfer_milliseconds:.1f}",
                quantity.ratio(one.step_milliseconds / one.milliseconds),
            )
        )
        for one in found
    ]
    return Table(columns(*titles), tuple(rows))


def _name(cell: Cell) -> str:
    return cell.name.partition(" [")[0]


def _cores(cell: Cell) -> int:
    return max(1, hardware_key(cell.finished[0].record).count)


def main() -> None:
    """Print the floors of a sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep")
    parser.add_argument("--results", type=Path, default=Path("results"))
    asked = parser.parse_args()
    store = ResultsStore.open(asked.results, create=False)
    (view,) = load_sweeps(store, [asked.sweep])
    speed = copy_bytes_per_second()
    print(terminal.table(floor_table(floors(view.cells, speed))))
    print(f"memory copy: {speed / 1e9:.1f} GB/s by one thread")


if __name__ == "__main__":
    main()
