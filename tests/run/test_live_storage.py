"""Live tensor storage is counted whoever holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import small_run
from torch import Tensor, nn

from bench.derive.live_storage import LiveStorage, risen
from bench.meters.call_sites import CallSites
from bench.meters.live_storage import LiveStorageMeter
from tools.bug_in_a_copy import copy_of_core

CPU = torch.device("cpu")
KEPT_COPY = Path(__file__).parent / "slow_downs" / "a-kept-copy.patch"


def live(make) -> LiveStorage:
    """What `make` makes and something still holds, over what there was before."""
    before, after = (LiveStorageMeter(CallSites(), CPU, 1) for _ in range(2))
    before.after_step(1)
    after.start()
    kept = make()
    after.after_step(1)
    assert before.found is not None
    assert after.found is not None
    del kept
    return after.found.model_copy(update={"bytes": (after.found.bytes[0] - before.found.bytes[0],)})


def viewed() -> list[Tensor]:
    whole = torch.zeros(1000)
    torch.zeros(500)  # is gone
    return [whole, whole[:10], whole.view(10, 100)]


def freed() -> Tensor:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def held_by_a_graph() -> Tensor:
    return (WEIGHT * torch.full((300,), 2.0)).sum()


def held_by_a_cycle() -> None:
    cycle: list[object] = [torch.zeros(1000)]
    cycle.append(cycle)


WEIGHT = nn.Parameter(torch.ones(300))


@pytest.mark.parametrize(
    ("make", "size"),
    [(viewed, 4000), (freed, 0), (held_by_a_graph, 1200 + 4), (held_by_a_cycle, 0)],
)
def test_storage_that_something_can_reach_counts_once(make, size):
    assert live(make).bytes == (size,)


def test_memory_that_came_past_the_dispatcher_counts_without_a_name():
    found = live(lambda: torch.UntypedStorage(800))
    assert found.bytes == (800,)
    assert any(not row.site for row in found.rows)


def test_makers_are_named():
    found = live(lambda: torch.zeros(1000))
    assert ["test_live_storage.py" in row.site for row in found.rows if row.bytes == 4000] == [True]


def test_steps_behind_the_second_are_not_followed():
    meter = LiveStorageMeter(CallSites(), CPU, 10)
    meter.start()
    meter.after_step(1)
    assert meter.found is None
    meter.after_step(2)
    made = len(meter._made)
    torch.zeros(10)
    assert (meter.found.step, len(meter._made)) == (2, made)


def test_a_step_under_torch_compile_is_not_followed():
    meter = LiveStorageMeter(CallSites(), CPU, 2)
    meter.start()
    meter.built(compiled=True)
    kept = torch.zeros(1000)
    assert not meter._made
    meter.after_step(2)
    assert meter.found.bytes[0] >= kept.nbytes  # Python holds it


@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", pytest.param("no_shard", marks=pytest.mark.nightly)]
)
def test_a_copy_of_the_weights_that_set_up_keeps_is_found_by_name(run_cells, tmp_path, strategy):
    run = small_run(
        {"name": "mfsdp", "strategy": strategy},
        model={"preset": "debug"},
        train={"global_batch": 4, "micro_batch": 2, "seq_len": 16},
    )
    copy_of_core(tmp_path / "core", KEPT_COPY)
    found = []
    for name, core in (("before", None), ("after", tmp_path / "core")):
        finished = run_cells(tmp_path, {name: run}, core)[name]
        found.append(LiveStorage.model_validate(finished.document("memory.json")["live"]))
    before, after = found
    ((row, more),) = risen(before, after)
    assert row.site == "mfsdp_core/runtime/weight_buffers.py:WeightBuffers.adopt"
    assert more == 2 * 4_211_712  # both ranks, padding included
