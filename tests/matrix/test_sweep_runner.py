"""Running a plan: order, resume, retries, failures, the lock. No process: runs are stood in for."""

from __future__ import annotations

import threading

import pytest
import stand_in_runs
from stand_in_runs import StandIn, plan_of

from bench.errors import StoreFullError, StoreLockedError
from bench.plan import Plan
from bench.store import ResultsStore
from sweeps.progress import Remark, RunEnded, RunStarted, StepReached, SweepStarted
from sweeps.runner import Side, SweepOutcome

SWEEP = """\
name: a
matrix:
  product: {engine.name: [ddp, fsdp2, mfsdp]}
"""
DDP, FSDP2, MFSDP = ALL = [(cell, 0, None) for cell in ("ddp", "fsdp2", "mfsdp")]
AGAIN = [(cell, 1, None) for cell in ("ddp", "fsdp2", "mfsdp")]


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


def go(store: ResultsStore, launch: StandIn, plan: Plan | None = None, **options) -> SweepOutcome:
    launch.seen.clear()
    code = options.pop("code", lambda _: "code-1")
    sides = {None: Side(launch, code)}
    return stand_in_runs.go(plan or plan_of(SWEEP), store, sides, **options)


def test_every_cell_runs_once_in_the_order_of_the_plan_which_is_kept(store, stand_in):
    outcome = go(store, stand_in)
    assert stand_in.seen == ALL
    assert [run.state for run in outcome.ran] == ["ok", "ok", "ok"]
    assert [record.status.cell for record in store.records(sweep="a")] == ["ddp", "fsdp2", "mfsdp"]
    assert Plan.from_document(store.read_plan("a")) == plan_of(SWEEP)


def test_a_selection_runs_its_cells_and_keeps_the_whole_plan(store, stand_in):
    whole = plan_of(SWEEP)
    go(store, stand_in, whole.selected(["fsdp2"]), kept=whole)
    assert stand_in.seen == [FSDP2]
    assert Plan.from_document(store.read_plan("a")) == whole


def other_code_of_mfsdp(resolved) -> str:
    return "code-2" if resolved.engine.name == "mfsdp" else "code-1"


@pytest.mark.parametrize(
    ("text", "repeat", "options", "again"),
    [
        (SWEEP, 1, {}, []),
        (SWEEP, 2, {}, AGAIN),
        (SWEEP, 1, {"force": True}, ALL),
        (SWEEP, 1, {"code": other_code_of_mfsdp}, [MFSDP]),
        (SWEEP.replace("name: a", "name: b"), 1, {}, ALL),
        (SWEEP + "base: {train.steps: 5}\n", 1, {}, ALL),
        # A limit that cannot change a result.
        (SWEEP + "base: {launch.timeout_seconds: 5.0}\n", 1, {}, []),
    ],
)
def test_of_what_has_finished_that_alone_runs_again_that_is_missing_or_other(
    store, stand_in, text, repeat, options, again
):
    stand_in.ends[DDP] = ["unstable"]  # counts as finished
    assert go(store, stand_in).failed == ()
    outcome = go(store, stand_in, plan_of(text, repeat=repeat), **options)
    assert stand_in.seen == again
    assert len(outcome.done_before) == (3 if again in ([], AGAIN) else 3 - len(again))
    assert outcome.failed == ()


@pytest.mark.parametrize("state", ["crashed", "out_of_memory"])
def test_a_failed_run_is_a_record_and_the_sweep_goes_on_and_repeats_it_when_asked(
    store, stand_in, state
):
    stand_in.ends[DDP] = [state]
    outcome = go(store, stand_in)
    assert stand_in.seen == ALL
    assert [(run.cell, run.state) for run in outcome.failed] == [("ddp", state)]
    assert len(outcome.good) == 2
    outcome = go(store, stand_in)
    assert stand_in.seen == []
    assert [(run.cell, run.state) for run in outcome.failed] == [("ddp", state)]
    outcome = go(store, stand_in, retry_failed=True)
    assert stand_in.seen == [DDP]
    assert outcome.failed == ()
    assert len(outcome.good) == 3
    # A failure does not hide a good run of the same code.
    stand_in.ends[DDP] = [state]
    go(store, stand_in, force=True)
    assert go(store, stand_in).failed == ()
    assert stand_in.seen == []


@pytest.mark.parametrize(
    "file", ["spec.json", "status.json", "env.json", "steps.node0.jsonl", "its last step"]
)
def test_a_run_with_a_truncated_file_runs_again(store, stand_in, file: str):
    go(store, stand_in)
    folder = store.root / "runs" / next(iter(store.records(sweep="a"))).run_id
    if file == "its last step":
        path = folder / "steps.node0.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    else:
        (folder / file).write_bytes((folder / file).read_bytes()[:-20])
    go(store, stand_in)
    assert stand_in.seen == [DDP]
    assert go(store, stand_in).ran == ()


def test_too_many_failures_end_the_sweep(store, stand_in):
    stand_in.ends = {DDP: ["crashed"], FSDP2: ["crashed"]}
    events = []
    outcome = go(store, stand_in, max_failures=1, publish=events.append)
    assert stand_in.seen == [DDP]
    assert outcome.not_started == 2
    assert Remark("stopped: 1 failed run, as many as --max-failures", is_warning=True) in events


def test_stop_ends_the_current_run_and_the_sweep(store, stand_in):
    stop = threading.Event()
    stand_in.during = lambda run, event: event.set() if run == FSDP2 else None
    outcome = go(store, stand_in, stop=stop)
    assert stand_in.seen == [DDP, FSDP2]
    assert outcome.interrupted
    assert [run.state for run in outcome.ran] == ["ok", "interrupted"]
    assert outcome.not_started == 1
    stand_in.during = lambda *_: None
    go(store, stand_in)
    assert stand_in.seen == [FSDP2, MFSDP]


def test_progress_is_published_in_order(store, stand_in):
    events = []
    go(store, stand_in, plan_of(SWEEP).selected(["ddp"]), publish=events.append)
    assert [type(event) for event in events] == [SweepStarted, RunStarted, StepReached, RunEnded]
    assert events[0] == SweepStarted("a", to_run=1, done_before=0, failed_before=0)
    assert (events[1].position, events[1].total, events[1].steps) == (1, 1, 20)
    assert (events[3].run.state, events[3].run.reason) == ("ok", "was ok")


def test_a_second_runner_is_refused_before_it_touches_the_plan(store, stand_in):
    with store.lock(), pytest.raises(StoreLockedError, match="another runner"):
        go(store, stand_in)
    assert stand_in.seen == []
    assert store.sweeps() == []


def test_a_full_disk_keeps_what_was_finished_and_runs_the_rest_later(store, stand_in):
    def fail_second(run, stop):
        if run == FSDP2:
            raise StoreFullError("no space left")

    stand_in.during = fail_second
    with pytest.raises(StoreFullError):
        go(store, stand_in)
    stand_in.during = lambda *_: None
    outcome = go(store, stand_in)  # the lock is free
    assert stand_in.seen == [FSDP2, MFSDP]
    assert [run.cell for run in outcome.done_before] == ["ddp"]
