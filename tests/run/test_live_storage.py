"""Live tensor storage is counted whoever holds it; what a ledger does not say stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.derive.live_storage import LiveStorage, over_ranks, risen
from bench.meters.call_sites import CallSites
from bench.meters.live_storage import LiveStorageMeter
from bench.resolve.resolution import resolve_anywhere
from bench.spec import EngineSpec, LaunchSpec, MeasureSpec, ModelSpec, RunSpec, TrainSpec
from bench.validate.patched_core import copy_of_core

CPU = torch.device("cpu")
KEPT_COPY = Path(__file__).parents[2] / "tests" / "run" / "slow_downs" / "a-kept-copy.patch"


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


def cell(engine: str, strategy: str):
    sharding = {} if engine in ("ddp", "single") else {"strategy": strategy}
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug"),
            engine=EngineSpec(name=engine, **sharding),
            train=TrainSpec(steps=3, global_batch=4, micro_batch=2, seq_len=16),
            launch=LaunchSpec(ranks=2),
            measure=MeasureSpec(),
        )
    )


CELLS = {
    "mfsdp": ("mfsdp", "optim_grads_params"),
    "whole": ("mfsdp", "no_shard"),
    "fsdp2": ("fsdp2", "optim_grads_params"),
    "ddp": ("ddp", ""),
}


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory) -> dict[str, LiveStorage]:
    return held(run_cells, tmp_path_factory.mktemp("live"), *CELLS)


def held(run_cells, root: Path, *names: str, core: Path | None = None) -> dict[str, LiveStorage]:
    found = run_cells(root, {name: cell(*CELLS[name]) for name in names}, core)
    documents = {name: one.document("memory.json") for name, one in found.items()}
    return {name: LiveStorage.model_validate(one["live"]) for name, one in documents.items()}


@pytest.mark.processes
def test_the_ledger_of_the_core_says_every_byte_but_those_of_its_questions(cells):
    for name in ("mfsdp", "whole"):
        assert 0 < cells[name].ledger_difference_per_rank < 100, name


@pytest.mark.processes
def test_engines_without_a_ledger_are_looked_at_as_well(cells):
    weights = 4_198_912
    assert cells["fsdp2"].ledger_difference_per_rank is None
    # main weights and two moments, sharded; rotary tables and scalars of the optimizer
    assert 0 < cells["fsdp2"].bytes_per_rank - 3 * weights / 2 < 20_000
    # The same and gradients, whole; the buckets are held by C++ alone.
    assert 0 < cells["ddp"].bytes_per_rank - 4 * weights < 20_000


@pytest.mark.processes
def test_a_copy_of_the_weights_that_set_up_keeps_is_found_by_name(cells, run_cells, tmp_path):
    copy_of_core(tmp_path / "core", KEPT_COPY)
    (tmp_path / "runs").mkdir()
    kept = held(run_cells, tmp_path / "runs", "mfsdp", "whole", core=tmp_path / "core")
    for name, after in kept.items():
        before = cells[name]
        assert after.ledger_bytes == before.ledger_bytes
        ((row, more),) = risen(before, after)
        assert row.site == "mfsdp_core/runtime/weight_buffers.py:WeightBuffers.adopt"
        assert more == 2 * 4_211_712  # both ranks, padding included
        assert after.ledger_difference_per_rank > 4_211_712


def test_ranks_are_added_up_by_site():
    one = LiveStorage(
        step=2, bytes=(5,), ledger_bytes=(4,), rows=({"site": "a", "bytes": 5, "storages": 1},)
    )
    both = over_ranks([one, one])
    assert (both.bytes, both.ledger_bytes, both.rows[0].bytes) == ((5, 5), (4, 4), 10)
    assert both.ledger_difference_per_rank == 1
