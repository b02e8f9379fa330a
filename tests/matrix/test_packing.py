"""Runs side by side: which may, on what, and what becomes of them. No process is started."""

from __future__ import annotations

import threading
import time

import pytest
import stand_in_runs
from stand_in_runs import ended

from bench.launch.share import CORES_VARIABLE, Share
from bench.record import RunStatus
from bench.resolve import Machine
from bench.resolve.cuda_devices import CudaDevice
from bench.store import ResultsStore, StoreFullError
from sweeps.definition import parse_sweep
from sweeps.document import SweepFileError
from sweeps.execution import Side
from sweeps.packing import Resources
from sweeps.plan import Plan
from sweeps.progress import Remark
from sweeps.runner import BlockRunner, SweepOutcome

FOUR = Resources(("0", "1", "2", "3"), (), 2**40)
SWEEP = """\
name: p
pack: true
base: {train: {global_batch: 8, steps: 1}, launch: {ranks: 2}}
matrix:
  product: {train.seed: [1, 2, 3]}
  include: [{train.seed: 4, launch.ranks: 4}]
"""


class StandIn:
    """Takes the place of `bench.launch.run.launch`; says which runs went on at the same time."""

    def __init__(self) -> None:
        self.shares: dict[str, Share | None] = {}
        self.going: set[str] = set()
        self.together: list[frozenset[str]] = []
        self.during = lambda _cell, _stop: time.sleep(0.15)
        self.states: dict[str, str] = {}
        self.lock = threading.Lock()

    def __call__(self, resolved, folder, *, stop, share=None, **_) -> RunStatus:
        cell = folder.status.cell
        with self.lock:
            self.shares[cell] = share
            self.going.add(cell)
            self.together.append(frozenset(self.going))
        try:
            self.during(cell, stop)
        finally:
            with self.lock:
                self.going.remove(cell)
        state = "interrupted" if stop.is_set() else self.states.get(cell, "ok")
        return ended(resolved, folder, state)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(Resources, "of_this_machine", lambda: FOUR)
    return StandIn()


def plan_of(text: str = SWEEP) -> Plan:
    return stand_in_runs.plan_of(text, machine=Machine(cpu_count=4, memory_bytes=2**40))


def go(store: ResultsStore, launch: StandIn, text: str = SWEEP, **options) -> SweepOutcome:
    sides = {None: Side(launch, lambda _: "code")}
    return stand_in_runs.go(plan_of(text), store, sides, **options)


def test_runs_that_leave_cores_free_go_on_side_by_side_and_are_marked(store, stand_in):
    first, second, third, whole = plan_of().cells
    both = threading.Barrier(2)
    stand_in.during = lambda cell, _: cell in (first.id, second.id) and both.wait(5)
    outcome = go(store, stand_in)
    assert max(map(len, stand_in.together)) == 2, "four cores hold two runs of two"
    shares = [stand_in.shares[cell.id] for cell in (first, second, third)]
    assert [len(share.names) for share in shares] == [2, 2, 2]
    assert not set(shares[0].names) & set(shares[1].names)
    assert stand_in.shares[whole.id] is None
    assert frozenset({whole.id}) in stand_in.together, "it waits for the whole machine"
    assert len(outcome.ran) == 4
    packed = {r.status.cell: r.status.packed for r in store.records()}
    assert packed == {first.id: True, second.id: True, third.id: True, whole.id: False}
    assert not any(r.status.comparable_in_time for r in store.records() if r.status.packed)


def test_what_is_known_to_be_too_much_memory_together_waits(store, stand_in, monkeypatch):
    monkeypatch.setattr("sweeps.packing.least_bytes", lambda _: 2**39 + 1)
    go(store, stand_in)
    assert {len(going) for going in stand_in.together} == {1}


def test_a_failure_touches_no_other_run_and_enough_of_them_stop_the_sweep(
    store, stand_in, monkeypatch
):
    told, both, given_up = [], threading.Barrier(2), threading.Event()
    give_up = BlockRunner._give_up
    monkeypatch.setattr(BlockRunner, "_give_up", lambda *one: (give_up(*one), given_up.set()))
    text = SWEEP.replace("[1, 2, 3]", "[1, 2, 3, 5, 6, 7]")
    first = plan_of(text).cells[0].id
    stand_in.states = {first: "crashed"}
    stand_in.during = lambda cell, _: (both.wait(5), cell == first or given_up.wait(5))
    outcome = go(store, stand_in, text, max_failures=1, publish=told.append)
    assert [run.state for run in outcome.ran] == ["crashed", "ok"]
    assert outcome.not_started == 5
    (stopped,) = (event for event in told if isinstance(event, Remark))
    assert "1 failed run, as many as --max-failures" in stopped.text


def test_ctrl_c_ends_all_that_go_on_and_the_next_call_runs_them_again(store, stand_in):
    stop = threading.Event()
    waiting = threading.Barrier(3)

    def during(_cell: str, stop: threading.Event) -> None:
        waiting.wait(5)
        stop.wait(5)

    stand_in.during = during
    threading.Thread(target=lambda: (waiting.wait(5), stop.set()), daemon=True).start()
    outcome = go(store, stand_in, stop=stop)
    assert [run.state for run in outcome.ran] == ["interrupted", "interrupted"]
    assert (outcome.interrupted, outcome.not_started) == (True, 2)
    stand_in.during = lambda *_: None
    assert len(go(store, stand_in).ran) == 4


def test_a_full_disk_ends_all_that_go_on(store, stand_in):
    first, second, *_ = (cell.id for cell in plan_of().cells)
    both = threading.Barrier(2)

    def during(cell: str, stop: threading.Event) -> None:
        both.wait(5)
        if cell == first:
            raise StoreFullError("full")
        assert stop.wait(5)

    stand_in.during = during
    with pytest.raises(StoreFullError):
        go(store, stand_in)
    ended = {r.status.cell: r.status.state for r in store.records()}
    assert ended[second] == "interrupted"
    assert len(ended) == 2


def test_a_packed_run_counts_where_runs_are_packed_and_for_no_plan_that_wants_times(
    store, stand_in
):
    go(store, stand_in)
    assert not go(store, stand_in).ran
    told = []
    again = go(store, stand_in, SWEEP.replace("pack: true\n", ""), publish=told.append)
    assert len(again.ran) == 3, "the run that had the whole machine stands"
    assert "it was packed, so it has no times" in told[0].again[0]
    assert {len(going) for going in stand_in.together[-3:]} == {1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("interleave: true\narms: {a: {}, b: {}}\n", "sweep.yaml:2: pack: interleaved arms are"),
        (
            "arms: {a: {}, b: {}}\nmatrix: {product: {train.seed: [1]}}\n"
            "targets: [{when: {train.seed: 1}, base: a, head: b, at_most: {step_time: 1.0}}]\n",
            "step_time: a target for a time, which packed runs have not",
        ),
        ("", "pack: expected a valid boolean, found 2"),
    ],
)
def test_packing_is_refused_where_times_are_asked_for(text: str, says: str) -> None:
    pack = "true" if text else "2"
    with pytest.raises(SweepFileError) as refused:
        parse_sweep(f"name: p\npack: {pack}\n{text}")
    assert says in str(refused.value)


def test_devices_are_named_as_this_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Machine(2, 1, (CudaDevice("a"), CudaDevice("b")))
    monkeypatch.setattr(Machine, "detect", lambda: two)
    for visible, names in (("4, 6,9", ("4", "6")), (None, ("0", "1"))):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert Resources.of_this_machine().devices == names
    assert Share("devices", ("4",)).variables() == {"CUDA_VISIBLE_DEVICES": "4"}
    assert Share("cores", ("0", "3")).variables() == {CORES_VARIABLE: "0,3"}
