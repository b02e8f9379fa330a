"""Running a plan: order, resume, retries, failures, the lock. No process: runs are stood in for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.record import RunStatus, StepSample
from bench.resolve import Machine
from bench.store import ResultsStore, StoreFullError, StoreLockedError
from sweeps.definition import parse_sweep
from sweeps.execution import Side
from sweeps.plan import Plan
from sweeps.planning import make_plan
from sweeps.progress import RunEnded, RunStarted, StepReached, SweepStarted, SweepStopped
from sweeps.resume import RunOptions
from sweeps.runner import SweepOutcome, run_sides

LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
SWEEP = """\
name: a
matrix:
  product: {engine.name: [ddp, fsdp2, mfsdp]}
"""


def nothing(_cell: str, _stop: threading.Event) -> None:
    pass


class StandIn:
    """Takes the place of `bench.launch.launch`: no process, a state by cell."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.seen: list[tuple[str, int]] = []
        self.during: Callable[[str, threading.Event], object] = nothing

    def __call__(self, resolved, folder, *, stop, on_step=None) -> RunStatus:
        folder.write_environment({})
        for rank in range(resolved.launch.ranks):
            steps = range(1, resolved.train.steps + 1)
            folder.append_steps(
                rank, *(StepSample(step, 10.0, 2.0, 1.0, 1e-3, 64, 0, 1) for step in steps)
            )
        cell = folder.status.cell
        self.seen.append((cell, folder.status.repeat))
        if on_step is not None:
            on_step(1)
        self.during(cell, stop)
        state = "interrupted" if stop.is_set() else self.states.get(cell, "ok")
        status = folder.status.model_copy(update={"state": state, "reason": f"was {state}"})
        folder.write_status(status)
        return status


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    return ResultsStore.open(tmp_path / "results", create=True)


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


def plan_of(text: str = SWEEP, **options) -> Plan:
    return make_plan(parse_sweep(text), LAPTOP, **options)


def go(store: ResultsStore, launch: StandIn, plan: Plan | None = None, **options) -> SweepOutcome:
    launch.seen.clear()
    rest = {key: options.pop(key) for key in ("stop", "publish", "whole") if key in options}
    code = options.pop("code", "code-1")
    return run_sides(
        plan or plan_of(),
        store,
        sides={None: Side(launch, code if callable(code) else lambda _: code)},
        options=RunOptions(**options),
        **rest,
    )


def test_every_cell_runs_once_in_the_order_of_the_plan(store, stand_in):
    outcome = go(store, stand_in)
    assert stand_in.seen == [("ddp", 0), ("fsdp2", 0), ("mfsdp", 0)]
    assert [run.state for run in outcome.ran] == ["ok", "ok", "ok"]
    assert [record.status.cell for record in store.records(sweep="a")] == ["ddp", "fsdp2", "mfsdp"]


def test_the_plan_is_kept_beside_the_records(store, stand_in):
    go(store, stand_in)
    assert Plan.from_document(store.read_plan("a")) == plan_of()


def test_a_selection_runs_its_cells_and_keeps_the_whole_plan(store, stand_in):
    whole = plan_of()
    go(store, stand_in, whole.selected(["fsdp2"]), whole=whole)
    assert stand_in.seen == [("fsdp2", 0)]
    assert Plan.from_document(store.read_plan("a")) == whole


def test_repeats_are_spread_over_the_whole_sweep(store, stand_in):
    go(store, stand_in, plan_of(repeat=2))
    assert stand_in.seen[:4] == [("ddp", 0), ("fsdp2", 0), ("mfsdp", 0), ("ddp", 1)]


def test_finished_runs_are_not_repeated(store, stand_in):
    go(store, stand_in)
    outcome = go(store, stand_in)
    assert stand_in.seen == []
    assert len(outcome.done_before) == 3


def test_an_unsteady_run_counts_as_finished(store, stand_in):
    stand_in.states["ddp"] = "unstable"
    go(store, stand_in)
    assert go(store, stand_in).failed == ()
    assert stand_in.seen == []


def test_more_repeats_run_only_what_is_missing(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, plan_of(repeat=2))
    assert stand_in.seen == [("ddp", 1), ("fsdp2", 1), ("mfsdp", 1)]


def test_other_code_runs_again(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, code=lambda r: "code-2" if r.engine.name == "mfsdp" else "code-1")
    assert stand_in.seen == [("mfsdp", 0)]


def test_another_configuration_under_the_same_name_runs_again(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, plan_of(SWEEP + "base: {train.steps: 5}\n"))
    assert len(stand_in.seen) == 3


def test_limits_that_cannot_change_a_result_do_not_run_it_again(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, plan_of(SWEEP + "base: {launch.timeout_seconds: 5.0}\n"))
    assert stand_in.seen == []


def test_force_runs_everything_again(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, force=True)
    assert len(stand_in.seen) == 3


def test_a_failed_run_is_a_record_and_the_sweep_goes_on(store, stand_in):
    stand_in.states["ddp"] = "out_of_memory"
    outcome = go(store, stand_in)
    assert len(stand_in.seen) == 3
    assert [(run.cell, run.state) for run in outcome.failed] == [("ddp", "out_of_memory")]
    assert len(outcome.good) == 2


def test_a_failed_run_is_not_repeated_unasked_and_stays_a_failure(store, stand_in):
    stand_in.states["ddp"] = "crashed"
    go(store, stand_in)
    outcome = go(store, stand_in)
    assert stand_in.seen == []
    assert [run.cell for run in outcome.failed] == ["ddp"]


def test_retry_failed_runs_failures_alone(store, stand_in):
    stand_in.states["ddp"] = "crashed"
    go(store, stand_in)
    stand_in.states.clear()
    outcome = go(store, stand_in, retry_failed=True)
    assert stand_in.seen == [("ddp", 0)]
    assert outcome.failed == ()
    assert len(outcome.good) == 3


def test_a_failure_does_not_hide_a_good_run_of_the_same_code(store, stand_in):
    go(store, stand_in)
    stand_in.states["ddp"] = "crashed"
    go(store, stand_in, force=True)
    assert go(store, stand_in).failed == ()
    assert stand_in.seen == []


def test_interrupted_runs_run_again(store, stand_in):
    stand_in.states["ddp"] = "interrupted"
    go(store, stand_in)
    stand_in.states.clear()
    go(store, stand_in)
    assert stand_in.seen == [("ddp", 0)]


def test_records_of_another_sweep_do_not_count(store, stand_in):
    go(store, stand_in)
    go(store, stand_in, plan_of(SWEEP.replace("name: a", "name: b")))
    assert len(stand_in.seen) == 3


@pytest.mark.parametrize("file", ["spec.json", "status.json", "env.json", "steps.node0.jsonl"])
def test_a_run_with_a_truncated_file_runs_again(store, stand_in, file: str):
    go(store, stand_in)
    path = store.root / "runs" / next(iter(store.records(sweep="a"))).run_id / file
    path.write_bytes(path.read_bytes()[:-20])
    go(store, stand_in)
    assert stand_in.seen == [("ddp", 0)]
    assert go(store, stand_in).ran == ()


def test_a_run_that_lacks_its_last_steps_runs_again(store, stand_in):
    go(store, stand_in)
    path = store.root / "runs" / next(iter(store.records(sweep="a"))).run_id / "steps.node0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    go(store, stand_in)
    assert stand_in.seen == [("ddp", 0)]


def test_too_many_failures_end_the_sweep(store, stand_in):
    stand_in.states = {"ddp": "crashed", "fsdp2": "crashed"}
    events = []
    outcome = go(store, stand_in, max_failures=1, publish=events.append)
    assert stand_in.seen == [("ddp", 0)]
    assert outcome.not_started == 2
    assert SweepStopped("1 failed run, as many as --max-failures") in events


def test_stop_ends_the_current_run_and_the_sweep(store, stand_in):
    stop = threading.Event()
    stand_in.during = lambda cell, event: event.set() if cell == "fsdp2" else None
    outcome = go(store, stand_in, stop=stop)
    assert stand_in.seen == [("ddp", 0), ("fsdp2", 0)]
    assert outcome.interrupted
    assert [run.state for run in outcome.ran] == ["ok", "interrupted"]
    assert outcome.not_started == 1


def test_progress_is_published_in_order(store, stand_in):
    events = []
    go(store, stand_in, plan_of().selected(["ddp"]), publish=events.append)
    assert [type(event) for event in events] == [SweepStarted, RunStarted, StepReached, RunEnded]
    assert events[0] == SweepStarted("a", to_run=1, done_before=0, failed_before=0)
    assert (events[1].position, events[1].total, events[1].steps) == (1, 1, 20)
    assert (events[3].run.state, events[3].run.reason) == ("ok", "was ok")


def test_a_second_runner_is_refused_before_it_touches_the_plan(store, stand_in):
    with store.lock(), pytest.raises(StoreLockedError, match="another runner"):
        go(store, stand_in)
    assert stand_in.seen == []
    assert store.sweeps() == []


def test_the_lock_is_free_after_an_error(store, stand_in):
    def fail(cell, stop):
        raise StoreFullError("no space left")

    stand_in.during = fail
    with pytest.raises(StoreFullError):
        go(store, stand_in)
    stand_in.during = nothing
    assert len(go(store, stand_in).ran) == 3


def test_a_full_disk_keeps_what_was_finished_and_runs_the_rest_later(store, stand_in):
    def fail_second(cell, stop):
        if cell == "fsdp2":
            raise StoreFullError("no space left")

    stand_in.during = fail_second
    with pytest.raises(StoreFullError):
        go(store, stand_in)
    stand_in.during = nothing
    outcome = go(store, stand_in)
    assert stand_in.seen == [("fsdp2", 0), ("mfsdp", 0)]
    assert [run.cell for run in outcome.done_before] == ["ddp"]
