"""Blocks whose arms are started together and train in turn, several times over.

Drift, a throttled clock and other work on the machine then meet both arms within seconds. Nothing
else changes: each arm makes a run with a record of its own, and a block is still one start of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace

import psutil

from bench.launch import turns as launch_turns
from bench.launch.code import RankCode, checkout_root
from bench.launch.stop_request import PartialStop
from bench.launch.turns import Barrier
from bench.record import FINISHED_GOOD, STOPPED
from bench.resolve.state_bytes import state_bytes_of_all_ranks
from bench.spec import ResolvedRun
from sweeps.blocks import Block
from sweeps.execution import RunMaker
from sweeps.progress import one_at_a_time
from sweeps.resume import PastRun

LEAST_STEPS = 3
"""Of a turn: fewer have no median worth the name."""

_MODULE = launch_turns.__name__.replace(".", "/") + ".py"
_SHARE_OF_FREE_MEMORY = 0.5
"""What the states of all arms may take; activations and the processes themselves come on top."""


def possible_turns(
    asked: int, runs: Mapping[str, ResolvedRun], codes: Mapping[str, RankCode | None]
) -> tuple[int, str]:
    """How many turns the arms of a cell can take, and why not as many as were asked for.

    Args:
        asked: by the plan; 1 is one arm after the other, each started when it runs.
        runs: of the cell, by arm.
        codes: of the arms, None for this checkout.
    """
    if asked <= 1:
        return 1, ""
    why = _obstacle(runs, codes)
    if why:
        return 1, f"its arms run one after the other, without turns: {why}"
    most = max(1, min(run.train.steps for run in runs.values()) // LEAST_STEPS)
    if most < asked:
        return most, f"{most} turns instead of {asked}, as one needs {LEAST_STEPS} steps"
    return asked, ""


def _obstacle(runs: Mapping[str, ResolvedRun], codes: Mapping[str, RankCode | None]) -> str:
    if any(run.launch.device != "cpu" or run.launch.nodes > 1 for run in runs.values()):
        return "only ranks on the CPU of one machine can wait beside each other"
    for arm, code in codes.items():
        root = checkout_root() if code is None else code.root
        if not (root / _MODULE).is_file():
            return f"the bench of arm {arm} is older than turns"
    needed = sum(state_bytes_of_all_ranks(run) or 0 for run in runs.values())
    free = psutil.virtual_memory().available
    if needed > _SHARE_OF_FREE_MEMORY * free:
        return (
            f"their states take {needed / 2**30:.1f} GiB together, and {free / 2**30:.1f} GiB are"
            " free, of which half is for activations and processes"
        )
    return ""


def run_in_turns(
    maker: RunMaker, block: Block, attempt: int, *, turns: int, position: int, total: int
) -> list[PastRun]:
    """One attempt at `block`: a run of every arm, a failed one last.

    A run that fails ends the others: what they measure could not count. Their records say so.

    Args:
        maker: makes single runs.
        block: whose order is that of the first round of turns.
        attempt: its number.
        turns: of each run, at least 2.
        position: of its first run among `total`, for the progress.
        total: runs of this call.
    """
    stops = {str(arm): PartialStop(maker.stop) for arm in block.arms}
    publish = one_at_a_time(maker.publish)
    ranks = {str(arm): block.cell.of(arm).launch.ranks for arm in block.arms}
    with Barrier(ranks, turns) as barrier, ThreadPoolExecutor(len(ranks)) as threads:
        started: dict[Future[PastRun], str] = {}
        for number, run in enumerate(block.runs, start=position):
            arm = str(run.arm)
            own = replace(maker, stop=stops[arm], publish=publish)
            one = threads.submit(own.run, run, number, total, attempt, slot=barrier.slots[arm])
            started[one] = arm
        for ended in as_completed(started):
            why = _why_lost(ended)
            if why is not None:
                for arm, stop in stops.items():
                    if arm != started[ended] and not stop.is_set():
                        stop.why = f"its block was lost: arm {started[ended]} {why}"
                        stop.set()
    runs = [one.result() for one in started]
    return sorted(runs, key=lambda run: (run.state not in FINISHED_GOOD, run.state not in STOPPED))


def _why_lost(ended: Future[PastRun]) -> str | None:
    """None for a run that has finished."""
    error = ended.exception()
    if error is not None:
        return f"could not be recorded: {error}"
    run = ended.result()
    return None if run.state in FINISHED_GOOD else f"{run.state}: {run.reason}".rstrip(": ")
