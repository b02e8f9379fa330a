"""Corners of pure parts that no program enters: what a bug there would do is seen here alone."""

from __future__ import annotations

import warnings
from itertools import accumulate, product

import pytest
import torch

from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.grouping import ParameterFacts, plan_buckets
from mfsdp_core.plan.layout import within_padding_budget
from mfsdp_core.plan.pools import Buffer, plan_pool
from mfsdp_core.state.grad_norm import clip_grad_norm_
from mfsdp_core.streams import Streams

CPU = torch.device("cpu")


def test_peaks_of_a_ledger_are_those_of_every_sequence_of_bookings() -> None:
    """All sequences of six bookings of two categories, one in a pool, against running sums."""
    steps = [("gradients", 3), ("gradients", -3), ("communication_buffers", 2), ("pool", 5)]
    for sequence in product(steps, repeat=6):
        ledger = MemoryLedger()
        for category, count in sequence:
            in_pool = category == "pool"
            ledger.add("gradients" if in_pool else category, count, in_pool=in_pool)
        sums = {
            name: [0, *accumulate(count for category, count in sequence if category == name)]
            for name in ("gradients", "communication_buffers")
        }
        total = [0, *accumulate(count for category, count in sequence if category != "pool")]
        peaks = ledger.peak_bytes_by_category()
        assert {name: peaks[name] for name in sums} == {n: max(s) for n, s in sums.items()}
        assert ledger.peak_bytes == max(total)
        assert ledger.bytes_by_category()["gradients"] == sums["gradients"][-1]


def test_views_that_a_backward_pass_reads_get_the_slot_that_they_had_or_none() -> None:
    """Room in another slot does not help: autograd has saved views of the first."""
    rows = [
        Buffer(unit, f"{unit}/0", "compute_weights", "float32", range(1), 4, "use")
        for unit in "abc"
    ]
    plan = plan_pool("fixed_pool", rows, 2)
    pool = SlotPool("compute_weights", plan, streams=Streams(CPU), ledger=MemoryLedger())
    a, b, c = (DBuffer(row, pool) for row in rows)
    first = a.take()
    b.take()
    a.give()
    c.take()  # into the slot that a had
    b.give()
    assert pool.holders() == {0: "c"}
    assert not pool.has_room(a)
    assert pool.blocking("a") == ["c"]
    with pytest.raises(PoolExhaustedError, match=r"only slot 0 will do.*idle slots: slot 1"):
        a.take(in_place=True)
    assert pool.holders() == {0: "c"}
    c.give()
    again = a.take(in_place=True)
    assert again.data_ptr() == first.data_ptr()
    a.give()
    # In a forward pass another slot will do; it is the unit's from then on, also in place.
    c.take()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = a.take()
    a.give()
    assert a.take(in_place=True).data_ptr() == moved.data_ptr() != first.data_ptr()


def test_buckets_of_experts_keep_the_padding_rule_on_the_ranks_that_share_them() -> None:
    """Rows that do not fit together, over as many ranks as experts have and not as others have."""
    shapes = [(5, 64), (8, 27), (4, 72), (16,), (3, 7)]
    for ranks, of_experts in ((2, 3), (8, 1), (1, 8), (4, 2)):
        facts = [
            ParameterFacts((f"{kind}.{i}",), "u", shape, "bfloat16", True, kind == "expert")
            for kind in ("dense", "expert")
            for i, shape in enumerate(shapes)
        ]
        plans = plan_buckets(facts, ranks, expert_slices=of_experts)
        members = sorted(index for plan in plans for index in plan.members)
        assert members == list(range(len(facts)))
        for plan in plans:
            assert plan.layout.slices == (of_experts if plan.is_expert else ranks)
            assert within_padding_budget(plan.layout)
            assert {index >= len(shapes) for index in plan.members} == {plan.is_expert}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_narrow_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Squares of 300 overflow FP16, and a sum of many in BF16 stops growing."""
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (5000, 3)]
    for parameter, value in zip(parameters, (0.011, 300.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    gradients = [torch.zeros(0) if p.grad is None else p.grad.double() for p in parameters]
    wanted = torch.cat(gradients).norm()
    found = clip_grad_norm_(parameters, 1.0)
    assert found.dtype == torch.float32
    assert abs(float(found / wanted) - 1) < 1e-6
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, (gradient / (wanted + 1e-6)).to(dtype))
