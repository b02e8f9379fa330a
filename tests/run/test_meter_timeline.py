"""The timeline of one step: what it holds, and that other steps do not pay for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from small_runs import small_run

from bench.derive.timeline import moments, peak, read_timeline
from bench.meters.memory_timeline import RECORDED_STEP, TimelineMeter


@dataclass(frozen=True)
class Entry:
    category: str
    count_bytes: int
    bucket: str
    role: str = "compute_weights"
    in_pool: bool = False


class ScriptedLedger:
    """Holds one buffer from the start and 8 bytes that are only measured."""

    def __init__(self) -> None:
        self.subscribers: list[Callable[[Entry], None]] = []

    def alive(self) -> list[Entry]:
        return [Entry("main_weights", 100, "a/0", "main_weights")]

    def bytes_by_category(self) -> dict[str, int]:
        return {"main_weights": 100, "optimizer_state": 8, "gradients": 0}

    def subscribe(self, subscriber: Callable[[Entry], None]) -> Callable[[], None]:
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    def book(self, count_bytes: int) -> None:
        for subscriber in self.subscribers:
            subscriber(Entry("compute_weights", count_bytes, "a/0"))


def steps(count: int) -> tuple[ScriptedLedger, TimelineMeter, list[int]]:
    ledger = ScriptedLedger()
    meter = TimelineMeter(ledger, None)
    watched = []
    for step in range(1, count + 1):
        for part, sizes in {"microbatch 1": (16, -16), "update": (4,)}.items():
            meter.on_phase(part)
            for size in sizes:
                ledger.book(size)
        if ledger.subscribers:
            watched.append(step)
        meter.after_step(step)
    return ledger, meter, watched


def test_only_the_recorded_step_is_watched_and_it_is_one_that_never_counts():
    ledger, meter, watched = steps(5)
    assert watched == [RECORDED_STEP] == [2]
    assert not ledger.subscribers
    assert meter.timeline.step == 2


def test_the_timeline_holds_the_start_every_change_in_order_and_the_parts():
    _, meter, _ = steps(3)
    timeline = meter.timeline
    assert [(c.category, c.bytes, c.bucket) for c in timeline.start] == [
        ("main_weights", 100, "a/0"),
        ("optimizer_state", 8, ""),
    ]
    assert [c.bytes for c in timeline.changes] == [16, -16, 4]
    times = [c.milliseconds for c in timeline.changes]
    assert times == sorted(times)
    assert times[-1] <= timeline.milliseconds
    assert [name for _, name in timeline.marks] == ["microbatch 1", "update"]


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory):
    def cell(engine: str, profile: str = "none", recompute: str = "none", **switches: Any):
        model = {"preset": "hybrid-tiny", "pattern": "ME*", "experts": 4, "hidden": 96}
        return small_run(
            {"name": engine, **switches},
            model=model | {"recompute": recompute},
            train={"global_batch": 2},
            launch={"ranks": 1},
            measure={"profile": profile},
        )

    runs = {
        "single": cell("single"),
        "mfsdp": cell("mfsdp"),
        "profiled": cell("mfsdp", "memory"),
        "recomputed": cell("mfsdp", "memory", "full"),
        "max_pool": cell("mfsdp", allocator="max_pool"),
    }
    return run_cells(tmp_path_factory.mktemp("timelines"), runs)


@pytest.fixture(scope="module")
def documents(cells):
    return {name: found.document("memory.json") for name, found in cells.items()}


@pytest.mark.processes
def test_a_memory_profile_changes_no_loss_and_shows_what_recompute_saves(cells, documents):
    assert cells["profiled"].losses == cells["mfsdp"].losses != []
    saved, recomputed = (
        documents[name]["by_category_bytes"]["activations"] for name in ("profiled", "recomputed")
    )
    assert 0 < recomputed < saved / 2


@pytest.mark.processes
def test_the_peak_of_the_timeline_is_that_of_the_ledger(documents):
    memory = documents["mfsdp"]
    found = peak(read_timeline(memory))
    total = sum(memory["by_category_bytes"].values())
    # The categories' own peaks need not coincide, so their sum is an upper bound, and a close one.
    assert 0.8 * total < found.moment.total_bytes <= total
    assert found.moment.by_category["main_weights"] == memory["by_category_bytes"]["main_weights"]
    assert found.moment.by_category["optimizer_state"] > 0
    units = {held.unit for held in found.alive if held.role == "compute_weights"}
    assert units <= {"(root)", "layers.0", "layers.1", "layers.2"}
    assert len(units) > 1
    assert memory["ledger"]["peak_bytes"] == found.moment.total_bytes
    assert sum(memory["ledger"]["by_category_bytes"].values()) == found.moment.total_bytes
    assert documents["single"]["ledger"] is None


@pytest.mark.processes
def test_a_memory_profile_adds_activations_to_the_timeline(documents):
    plain, profiled = (read_timeline(documents[name]) for name in ("mfsdp", "profiled"))
    assert "activations" not in {c.category for c in plain.changes}
    saved = [c.bytes for c in profiled.changes if c.category == "activations"]
    held = [m.by_category["activations"] for m in moments(profiled)]
    recorded = documents["profiled"]["by_category_bytes"]["activations"]
    assert max(held) == pytest.approx(recorded, rel=0.01)
    assert len(saved) > 20
    # Between two steps autograd keeps next to nothing: its graph is gone.
    assert held[0] < 0.01 * max(held)
    assert held[-1] < 0.01 * max(held)


@pytest.mark.processes
def test_slots_of_a_pool_are_used_without_changing_the_total(documents):
    timeline = read_timeline(documents["max_pool"])
    used = [c for c in timeline.changes if c.in_pool]
    assert {c.role for c in used} == {"compute_weights", "grad_bucket"}
    assert sum(c.bytes for c in used) == 0
    assert {c.bucket for c in timeline.start if c.bucket == "(pool)"} == {"(pool)"}
