"""Live tensor storage is counted whoever holds it; what a ledger does not say stands beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.derive.live_storage import LiveStorage, over_ranks
from bench.meters.call_sites import CallSites
from bench.meters.live_storage import LiveStorageMeter

CPU = torch.device("cpu")


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


def test_views_count_their_storage_once_and_what_is_gone_does_not_count():
    def make() -> list[Tensor]:
        whole = torch.zeros(1000)
        torch.zeros(500)
        return [whole, whole[:10], whole.view(10, 100)]

    assert live(make).bytes == (4000,)


def test_freed_storage_behind_a_living_tensor_does_not_count():
    def make() -> Tensor:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        return tensor

    assert live(make).bytes == (0,)


def test_what_only_a_graph_of_autograd_holds_counts():
    weight = nn.Parameter(torch.ones(300))

    def make() -> Tensor:
        return (weight * torch.full((300,), 2.0)).sum()

    assert live(make).bytes == (1200 + 4,)


def test_what_only_a_cycle_holds_does_not_count():
    def make() -> None:
        cycle: list[object] = [torch.zeros(1000)]
        cycle.append(cycle)

    assert live(make).bytes == (0,)


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
    meter.watch(object(), compiled=True)
    kept = torch.zeros(1000)
    assert not meter._made
    meter.after_step(2)
    assert meter.found.bytes[0] >= kept.nbytes  # Python holds it


def test_ranks_are_added_up_by_site():
    one = LiveStorage(
        step=2, bytes=(5,), ledger_bytes=(4,), rows=({"site": "a", "bytes": 5, "storages": 1},)
    )
    both = over_ranks([one, one])
    assert (both.bytes, both.ledger_bytes, both.rows[0].bytes) == ((5, 5), (4, 4), 10)
    assert both.ledger_difference_per_rank == 1
