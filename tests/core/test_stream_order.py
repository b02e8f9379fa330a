"""Everything that touches the same memory is ordered, as a GPU with its streams would need it.

On torch's fake process group, which returns from every collective at once: one process stands for
a rank, and what is recorded is what the rank enqueues. Its numbers mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.engines.stream_order import StreamOrder, recorded_order
from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.observer import COPY_IN, CURRENT, Span
from mutants import is_noticed_by
from oracle.models import TwoLinears
from oracle.transformer_engine import Linear
from tools.bug_in_a_copy import UNLISTED

RANKS = 4
pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (1, RANKS)
#: Waited for when a rank has something to learn from it, and else before the next one.
KEPT = {"all_reduce of flags"}
BF16 = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
CODES = MixedPrecisionPolicy(torch.float32, weight_codec=Float8Reference("current"))


class FusedBlock(nn.Sequential):
    """Its layer's backward pass writes the gradient of the weight where it belongs."""

    def __init__(self) -> None:
        super().__init__(Linear(8, 8, True, bias=False, params_dtype=torch.float32, device="cpu"))


def sharded(block=TwoLinears, blocks=5, *, hybrid="", policy=None, dtype=torch.float32, **options):
    options.setdefault("zero_dp_strategy", 3)
    if hybrid:
        mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("outer", "inner"))
        options |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        options["hybrid_fsdp_group"] = dist.group.WORLD
        options["outer_dp_sharding_strategy"] = hybrid
    return fully_shard_model(
        nn.Sequential(*(block() for _ in range(blocks))).to(dtype),
        fsdp_unit_modules=[block],
        mixed_precision_policy=policy or MixedPrecisionPolicy(),
        **options,
    )


def recorded(model, *, dtype=torch.float32, steps=2, microbatches=2) -> StreamOrder:
    """The order of training steps; before each update, weights are gathered ahead as well."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    with recorded_order(model.streams) as order:
        for _ in range(steps):
            for index in range(microbatches):
                with model.sync() if index == microbatches - 1 else model.no_sync():
                    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
            clip_grad_norm_(model, 1.0)
            model.start_param_sync()
            optimizer.step()
            optimizer.zero_grad()
    return order


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
POOLED = ({}, {"allocator": "temporary"}, {"allocator": "fixed_pool"}, {"allocator": "max_pool"})


@pytest.mark.sample
@pytest.mark.parametrize("memory", POOLED, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_has_no_race_under_any_strategy_and_allocator(strategy, memory):
    model = sharded(zero_dp_strategy=strategy, policy=BF16, **memory)
    order = recorded(model)
    assert [str(race) for race in order.races] == []
    assert set(order.unwaited) <= KEPT
    assert order.operations > 500
    assert model.wire_log.counts["all_reduce" if strategy == "no_shard" else "reduce_scatter"]


@pytest.mark.parametrize(
    "options",
    [
        {"hybrid": "no_shard"},
        {"hybrid": "no_shard", "policy": CODES, "zero_dp_strategy": "no_shard"},
        {"hybrid": "optim", "policy": BF16, "allocator": "fixed_pool"},
        {"hybrid": "optim", "policy": CODES, "zero_dp_strategy": "optim"},
        {"zero_dp_strategy": "no_shard"},
        {"zero_dp_strategy": "optim"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "zero_dp_strategy": "optim_grads", "allocator": "max_pool"},
        {"policy": CODES, "dtype": torch.bfloat16},
        {"transport": "point_to_point"},
        {"transport": "point_to_point", "allocator": "fixed_pool"},
        {"transport": "point_to_point", "zero_dp_strategy": "no_shard"},
        {"average_in_collective": True, "unused_parameters": "zero"},
        {"overlap_param_gather": False},
        {"enable_fine_grained_param_gather": True},
        {"prefetch_budget_bytes": 10_000},
        {"block": FusedBlock, "allocator": "fixed_pool"},
        {"block": FusedBlock, "zero_dp_strategy": "optim"},
    ],
    ids=str,
)
def test_training_has_no_race_in_other_schedules(options):
    order = recorded(sharded(**options), dtype=options.get("dtype", torch.float32))
    assert [str(race) for race in order.races] == []
    assert set(order.unwaited) <= KEPT


def test_a_unit_computes_while_the_next_ones_weights_are_cast(monkeypatch):
    """FP32 main weights are cast to BF16 at every gather, which CUDA does on a stream for it."""
    casts, ahead = [], []
    access = StreamOrder._access

    def seen(order, found, clock):
        access(order, found, clock)
        if found.writes and found.name == "aten::copy_" and found.stream == COPY_IN:
            casts.append(found)
        elif found.name == "aten::addmm" and found.stream == CURRENT:
            ahead.append(order._clocks[COPY_IN][COPY_IN] - clock.get(COPY_IN, 0))

    monkeypatch.setattr(StreamOrder, "_access", seen)
    units, steps = 5, 2
    order = recorded(sharded(blocks=units, dtype=torch.bfloat16), dtype=torch.bfloat16, steps=steps)
    assert order.races == []
    assert len(casts) >= units * steps
    assert max(ahead) >= 1


def test_r17_a_fused_kernel_never_writes_into_a_bucket_that_is_being_reduced():
    # On a group of their own, whoever waits for a gather does not wait for a reduction as well.
    gathers = dist.new_group(range(RANKS))
    order = recorded(sharded(FusedBlock, allocator="fixed_pool", fsdp_group_ag=gathers))
    assert [str(race) for race in order.races] == []


#: Bugs of order alone, in the folder of patches that are not historical.
ORDERING = (
    "weights-are-computed-with-before-their-gather-was-waited-for",
    "the-cast-of-a-rank-s-own-part-comes-after-its-gather-was-issued",
    "the-outer-stage-starts-before-the-inner-one-has-landed",
    "an-accumulator-is-read-before-its-reduction-in-place-has-ended",
)


@pytest.mark.nightly
@pytest.mark.parametrize("bug", [bug for bug in UNLISTED if bug.id in ORDERING], ids=lambda b: b.id)
def test_a_bug_of_order_alone_is_noticed(bug, tmp_path):
    assert is_noticed_by(Path(__file__).name, "has_no_race", bug, tmp_path)


# -- the checker itself ------------------------------------------------------------------------

HERE = Span(0, 8)


ELSEWHERE = Span(8, 16)
#: What is enqueued, and the races and collectives that nobody waited for.
ORDERS = {
    "a read that does not wait for a write of another stream": (
        lambda o: (o.issue("gather", "a", (), (HERE,)), o.run("mm", (Span(4, 6),), ())),
        ["mm (reads, on compute) does not wait for gather (writes, on a)"],
        ["gather"],
    ),
    "a read that waits": (
        lambda o: (o.waited(o.issue("gather", "a", (), (HERE,))), o.run("mm", (HERE,), ())),
        [],
        [],
    ),
    "two reads, and a write elsewhere": (
        lambda o: (o.issue("reduce", "a", (HERE,), ()), o.run("mm", (HERE,), (ELSEWHERE,))),
        [],
        ["reduce"],
    ),
    "a write behind a read of another stream": (
        lambda o: (o.issue("reduce", "a", (HERE,), ()), o.run("zero_", (), (HERE,))),
        ["zero_ (writes, on compute) does not wait for reduce (reads, on a)"],
        ["reduce"],
    ),
    "a collective behind what was enqueued before it": (
        lambda o: (o.run("cast", (), (HERE,)), o.issue("gather", "a", (HERE,), ())),
        [],
        ["gather"],
    ),
    "streams that are ordered by the time of issue alone": (
        lambda o: (o.issue("inner", "a", (), (HERE,)), o.issue("outer", "b", (HERE,), ())),
        ["outer (reads, on b) does not wait for inner (writes, on a)"],
        ["inner", "outer"],
    ),
    "streams that are ordered by waiting": (
        lambda o: (
            o.waited(o.issue("inner", "a", (), (HERE,))),
            o.issue("outer", "b", (HERE,), ()),
        ),
        [],
        ["outer"],
    ),
    "a wait for a later collective of the stream": (
        lambda o: (
            o.issue("first", "a", (), (HERE,)),
            o.waited(o.issue("second", "a", (), (ELSEWHERE,))),
            o.run("mm", (HERE,), ()),
        ),
        [],
        ["first"],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_checker_tells_races_and_what_nobody_waited_for(name):
    enqueue, races, unwaited = ORDERS[name]
    order = StreamOrder()
    enqueue(order)
    assert [str(race) for race in order.races] == races
    assert order.unwaited == unwaited


def test_what_a_backend_computes_while_it_is_waited_for_is_the_collectives_own():
    order = StreamOrder()
    number = order.issue("reduce_scatter", "a", (), (HERE,))
    order.waiting(number)
    order.run("aten::copy_", (), (HERE,))
    order.waited(number)
    order.run("mm", (HERE,), ())
    assert order.races == []
    assert order.operations == 2


def test_operations_are_recorded_with_what_they_read_and_write(monkeypatch):
    model = sharded(blocks=1)
    seen = []
    monkeypatch.setattr(StreamOrder, "run", lambda _self, *found: seen.append(found))
    with recorded_order(model.streams):
        x, y = torch.ones(4), torch.zeros(4)
        y[1:].add_(x[1:])
        x.view(2, 2)
    name, reads, writes = next(found[:3] for found in seen if found[0] == "aten::add_")
    second = x.data_ptr() + 4, x.data_ptr() + 16
    assert name == "aten::add_"
    assert second in list(reads)
    assert Span(y.data_ptr() + 4, y.data_ptr() + 16) in list(writes)
    assert not [found for found in seen if "view" in found[0]]
