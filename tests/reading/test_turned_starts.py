"""Arms that trained in turn are compared by turns; a machine that changes meanwhile is no noise."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from gate_runs import CELLS, Arm, record_arms

from bench.derive.metrics import CPU_TIME, STEP_TIME, THROUGHPUT
from bench.store import ResultsStore
from reports.gates.gate import gate
from reports.gates.gate_text import remarks
from reports.gates.noise import calibrate
from reports.gates.pairing import Pair, sides_of_arms
from reports.gates.policy import Policy
from reports.gates.spread import spread_of

THROTTLED = (1.0, 1.3, 1.0, 1.6, 1.0, 1.4)
NOW = datetime(2026, 3, 4, tzinfo=UTC)
CELL = {"zero3": CELLS["zero3"]}


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore.open(tmp_path / "results", create=True)


def paired(store: ResultsStore, *, head: Arm | None = None, **base: Any) -> Pair:
    """Eight blocks; in all of them the machine is slower now and then."""
    plain = Arm(machine=THROTTLED, **base)
    arms = {"base": plain, "head": head or plain}
    record_arms(store, arms, cells=CELL, noise=0.001)
    return sides_of_arms(store, "gate", None, None).pairs[0]


def test_a_machine_that_is_slower_now_and_then_hides_no_change(store):
    pair = paired(store, head=Arm(machine=THROTTLED, slower=1.05))
    found = {
        b: math.log(h / pair.base.of(STEP_TIME)[b]) for b, h in pair.head.of(STEP_TIME).items()
    }
    assert len(found) == 8
    assert [math.exp(one) for one in found.values()] == pytest.approx([1.05] * 8, rel=0.01)
    assert pair.base.not_steady == pair.head.not_steady == 0
    judged = gate(sides_of_arms(store, "gate", None, None), Policy(), lambda _: None)
    assert [j.verdict for j in judged.judgements if j.metric == "step_time"] == ["regressed"]
    (remark,) = [text for about, text in remarks(judged, NOW) if about == "turns"]
    assert remark.startswith("8 blocks: both arms of a block were started at once")


def test_cpu_time_and_throughput_go_by_turns_too(store):
    pair = paired(store, head=Arm(machine=THROTTLED, slower=1.1, cpu_noise=0.0), cpu_noise=0.0)
    for metric, ratio in ((THROUGHPUT, 1 / 1.1), (CPU_TIME, (66 + 5) / 65)):
        base, head = pair.base.of(metric), pair.head.of(metric)
        assert [head[b] / base[b] for b in base] == pytest.approx([ratio] * 8, rel=0.01)


def test_the_spread_within_a_start_is_that_of_its_turns(store):
    pair = paired(store)
    spread = spread_of(pair)
    assert spread is not None
    # Steps vary by 0.4 %, a turn has five of them, a start six turns.
    assert math.sqrt(spread.steps) == pytest.approx(1.57 * 0.004 * math.sqrt(2 / 30), rel=0.6)
    noise = calibrate([(pair.base, pair.head)], sweep="s", measured_utc="2026-11-22T00:00:00Z")
    assert noise.cells[0].floor < 0.01


def test_a_single_turn_is_a_run_like_any_other(store):
    record_arms(store, {"base": Arm(machine=(1.0,)), "head": Arm(machine=(1.0,))}, cells=CELL)
    one = sides_of_arms(store, "gate", None, None).pairs[0]
    record_arms(store, {"base": Arm(), "head": Arm()}, cells=CELL, sweep="plain")
    other = sides_of_arms(store, "plain", None, None).pairs[0]
    assert one.base.values == other.base.values
