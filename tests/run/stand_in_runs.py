"""Runs that nobody starts: what stands in for `launch`, and the plans that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

from small_runs import LAPTOP, RUN
from sweep_texts import parse_sweep

from bench.meters.sample_sink import SampleSink
from bench.plan import Plan, PlannedArm
from bench.record import RunStatus, StepSample
from bench.resolve import Machine
from bench.spec import ResolvedRun
from bench.store import ResultsStore, RunFolder
from bench.store.samples import node_file
from sweeps.planning import make_plan
from sweeps.resume import RunOptions
from sweeps.runner import Sides, SweepOutcome, run_sides

Run = tuple[str, int, str | None]
"""Cell, block and arm."""


def ended(resolved: ResolvedRun, folder: RunFolder, state: str = "ok", **changes: Any) -> RunStatus:
    """The record of a run with all its steps; `changes` are of its status."""
    folder.write_environment({"machine": "test"})
    with_steps(resolved, folder)
    return with_end(folder, state, **changes)


def append_samples(folder: RunFolder, rank: int, *samples: StepSample) -> None:
    """As a rank of node 0 writes them."""
    with SampleSink(folder.path / node_file(0), rank) as sink:
        for sample in samples:
            sink.append(sample)


def finished_run(store: ResultsStore, steps: int = 3) -> RunFolder:
    """The record of `RUN`, which was ok, with so many of its steps."""
    folder = store.new_run(RUN, sweep="s", cell="c", repeat=0, arm=None, code="x")
    samples = [StepSample(step, 1.0, 1.0, 1.0, 0.1, 8, 0, 1) for step in range(1, steps + 1)]
    for rank in range(RUN.launch.ranks):
        append_samples(folder, rank, *samples)
    folder.write_environment({})
    (folder.path / "memory.json").write_text("{}")
    folder.write_status(folder.status.model_copy(update={"state": "ok"}))
    folder.close()
    return folder


def with_steps(
    resolved: ResolvedRun, folder: RunFolder, milliseconds: float = 10.0, wire_bytes: int = 0
) -> None:
    """Samples of every step on every rank."""
    for rank in range(resolved.launch.ranks):
        for step in range(1, resolved.train.steps + 1):
            sample = StepSample(step, milliseconds, 2.0, 1.0, 1e-3, 64, wire_bytes, 1)
            append_samples(folder, rank, sample)


def with_end(folder: RunFolder, state: str = "ok", **changes: Any) -> RunStatus:
    """The status of a run that is over."""
    status = folder.status.model_copy(update={"state": state, **changes})
    folder.write_status(status)
    return status


class StandIn:
    """In the place of `bench.launch.run.launch`.

    ends: the states of the next runs of a cell, block and arm; what is not in it is ok. seen: what
    has run. during: called within each run.
    """

    def __init__(self) -> None:
        self.ends: dict[Run, list[str]] = {}
        self.seen: list[Run] = []
        self.during: Callable[[Run, Event], object] = lambda *_: None

    def __call__(
        self, resolved: ResolvedRun, folder: RunFolder, *, stop: Event, on_step: Any, **_: object
    ) -> RunStatus:
        folder.write_environment({})
        with_steps(resolved, folder)
        run = (folder.status.cell or "", folder.status.repeat, folder.status.arm)
        self.seen.append(run)
        on_step(1)
        self.during(run, stop)
        state = self.ends[run].pop(0) if self.ends.get(run) else "ok"
        if stop.is_set():
            state = "interrupted"
        if state == "wrong code":
            return with_end(folder, "crashed", code_proof="mismatch")
        return with_end(folder, state, reason=f"was {state}", code_proof="proven")


def plan_of(
    text: str, arms: tuple[str, ...] = (), machine: Machine = LAPTOP, **options: Any
) -> Plan:
    """The plan of a sweep file; with arms their blocks are interleaved."""
    plan = make_plan(parse_sweep(text), machine, **options)
    planned = tuple(PlannedArm(name, "", None, None, "2.13.0", "3.11.7") for name in arms)
    return replace(plan, arms=planned, interleaved=bool(arms))


def go(plan: Plan, store: ResultsStore, sides: Sides, **options: Any) -> SweepOutcome:
    """`run_sides`, whose options are all given by name."""
    rest = {"kept": plan, "stop": Event(), "publish": lambda _: None}
    rest |= {name: options.pop(name) for name in rest if name in options}
    return run_sides(plan, store, sides=sides, options=RunOptions(**options), **rest)
