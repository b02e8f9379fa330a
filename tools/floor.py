"""How far a sharded step is from its floor: `python -m tools.floor SWEEP`.

    floor = step of one process alone with one rank's share of the batch
            - its optimizer step (measured now) x the share of it that other ranks take over
            x ranks that share a core
            + bytes that a rank sends / speed of a memory copy (measured now, one thread)

The step alone holds all of the arithmetic and none of the communication. Its optimizer updates
whole weights; where optimizer state is sharded, a rank updates only as much as it holds.
Only cells with the dtypes of the cell `alone` have a floor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.derive.hardware import hardware_key
from bench.derive.metrics import STEP_TIME, WIRE_BYTES
from bench.engines.optimizer import build_optimizer
from bench.errors import NothingMeasuredError
from bench.resolve.parameter_facts import parameter_facts
from bench.resolve.state_bytes import state_bytes_by_category
from bench.spec import ResolvedRun
from bench.store import ResultsStore
from reports.renderers import quantity, terminal
from reports.renderers.table import Row, Table
from reports.views.cells import Cell
from reports.views.sweep_view import load_sweeps

ALONE = "alone"
_COPY_BYTES = 64 * 2**20
_COPIES = 20
_UPDATES = 8


@dataclass(frozen=True)
class Floor:
    """Milliseconds of one step of a cell: as measured, and of its floor by part.

    compute_milliseconds: with `optimizer_milliseconds`, the rank's share of the optimizer step.
    """

    cell: str
    step_milliseconds: float
    compute_milliseconds: float
    optimizer_milliseconds: float
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


def optimizer_milliseconds(resolved: ResolvedRun) -> float:
    """One optimizer step on the whole weights of `resolved`, as its threads do it; best of several.

    fp32 weights and gradients, by the optimizer that torch's engines are given.

    Raises:
        NothingMeasuredError: the model is the user's own.
    """
    if resolved.shape is None:
        raise NothingMeasuredError("no floor: the weights of a model of one's own are not known")
    threads = torch.get_num_threads()
    torch.set_num_threads(resolved.launch.threads_per_rank)
    facts = parameter_facts(resolved.shape, resolved.dtypes.compute)
    weights = [torch.nn.Parameter(torch.ones(fact.shape)) for fact in facts]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = build_optimizer(weights, resolved.train)
    best = float("inf")
    for _ in range(_UPDATES):
        start = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return best * 1e3


def optimizer_share(cell: ResolvedRun, alone: ResolvedRun) -> float:
    """Optimizer state that a rank of `cell` holds, and so updates, as a share of the whole."""
    whole = state_bytes_by_category(alone).get("optimizer_state", 0)
    own = state_bytes_by_category(cell).get("optimizer_state", 0)
    return min(1.0, own / whole) if whole else 1.0


def floors(
    cells: Sequence[Cell], copied_per_second: float, optimizer: Callable[[ResolvedRun], float]
) -> list[Floor]:
    """The floor of every measured cell with the dtypes of the cells named `alone` (of any arm).

    Args:
        cells: of one sweep.
        copied_per_second: bytes.
        optimizer: milliseconds of a whole optimizer step of a run (`optimizer_milliseconds`).

    Raises:
        NothingMeasuredError: no cell of that name has a time.
    """
    alone = [cell for cell in cells if _name(cell) == ALONE and cell.measured]
    if not alone:
        raise NothingMeasuredError(f"no cell named {ALONE!r} has a steady time: no floor")
    times = [t for cell in alone for t in cell.values(STEP_TIME)]
    dtypes = alone[0].resolved.dtypes
    update = optimizer(alone[0].resolved)
    rest = max(0.0, median(times) - update)
    found = []
    for cell in cells:
        step, sent = cell.value(STEP_TIME), cell.value(WIRE_BYTES)
        if _name(cell) == ALONE or step is None or sent is None or cell.resolved.dtypes != dtypes:
            continue
        launch = cell.resolved.launch
        crowding = max(1.0, launch.ranks * launch.threads_per_rank / _cores(cell))
        transfer = sent / launch.ranks / copied_per_second * 1e3
        own = update * optimizer_share(cell.resolved, alone[0].resolved)
        compute = (rest + own) * crowding
        found.append(Floor(cell.name, step, compute, own * crowding, transfer * crowding))
    return found


def floor_table(found: Sequence[Floor]) -> Table:
    """One row per cell."""
    titles = (
        "cell",
        "step ms",
        "floor ms",
        "of it optimizer ms",
        "of it transfer ms",
        "step / floor",
    )
    rows = [
        Row(
            (
                one.cell,
                f"{one.step_milliseconds:.1f}",
                f"{one.milliseconds:.1f}",
                f"{one.optimizer_milliseconds:.1f}",
                f"{one.transfer_milliseconds:.1f}",
                quantity.ratio(one.step_milliseconds / one.milliseconds),
            )
        )
        for one in found
    ]
    return Table.of(titles, rows)


def _name(cell: Cell) -> str:
    return cell.name.partition(" [")[0]


def _cores(cell: Cell) -> int:
    return max(1, hardware_key(cell.finished[0].record).count)


def main() -> None:
    """Print the floors of a sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep")
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args()
    store = ResultsStore.open(options.results, create=False)
    (view,) = load_sweeps(store, [options.sweep])
    speed = copy_bytes_per_second()
    print(terminal.table(floor_table(floors(view.cells, speed, optimizer_milliseconds))))
    print(f"memory copy: {speed / 1e9:.1f} GB/s by one thread")


if __name__ == "__main__":
    main()
