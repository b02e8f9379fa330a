"""Who hands out memory, who holds which slot, and what the ledger says of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_core
from conformance.judging import refuses, same
from conformance.small_model import (
    WIDTH,
    Small,
    Unit,
    batch,
    compare_gradients,
    pair,
    plain_backward,
)
from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import Allocator, DBuffer
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.buffers import CATEGORIES
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.pools import Buffer, plan_pool
from mfsdp_core.streams import Streams

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_FP32 = torch.float32


def _row(bucket: str, elements: int = 8, role: Any = "grad_bucket") -> Buffer:
    unit = bucket.partition("/")[0]
    return Buffer(unit, bucket, role, "float32", range(1), elements, "reduction")


def test_the_ledger_adds_up() -> None:
    """Totals, peaks, what is alive, meters, and subscribers up to their end."""
    ledger = MemoryLedger()
    seen: list[Any] = []
    same("categories", list(ledger.bytes_by_category()), list(CATEGORIES))
    same("peaks of nothing", set(ledger.peak_bytes_by_category().values()), {0})
    end = ledger.subscribe(seen.append)
    for category, count in (
        ("gradients", 8),
        ("main_weights", 4),
        ("gradients", -6),
        ("main_weights", 3),
        ("gradients", 1),
    ):
        ledger.add(category, count, bucket="b", role=category)
    found, peaks = ledger.bytes_by_category(), ledger.peak_bytes_by_category()
    same("now", (found["gradients"], found["main_weights"]), (3, 7))
    same("peaks", (peaks["gradients"], peaks["main_weights"], ledger.peak_bytes), (8, 7, 12))
    ledger.add("gradients", 2, bucket="p", role="r", in_pool=True)
    same("occupied", ledger.bytes_by_category(), found)
    alive = [(b.bucket, b.role, b.count_bytes, b.in_pool) for b in ledger.alive()]
    same(
        "alive",
        sorted(alive),
        [("b", "gradients", 3, False), ("b", "main_weights", 7, False), ("p", "r", 2, True)],
    )
    ledger.add("gradients", -2, bucket="p", role="r", in_pool=True)
    same("gone", len(ledger.alive()), 2)
    ledger.measure("optimizer_state", lambda: 5)
    same("measured", ledger.bytes_by_category()["optimizer_state"], 5)
    same("seen", [b.count_bytes for b in seen], [8, 4, -6, 3, 1, 2, -2])
    end()
    end()
    ledger.add("gradients", 1)
    same("ended", len(seen), 7)


def test_allocators_keep_their_promises() -> None:
    """New memory, the same object, or memory that stays; bytes on the ledger."""
    streams: Any = Streams(torch.device("cpu"))
    kinds: Any = (("nothing", False, 0), ("tensor", True, 0), ("memory", True, 32))
    for leaves, same_object, left in kinds:
        ledger = MemoryLedger()
        made: Any = Allocator(streams, ledger, leaves)
        a, b, other = (
            DBuffer(row, made) for row in (_row("a"), _row("b", 2), _row("a", 8, "outer_bucket"))
        )
        same("room", made.has_room(a), True)
        first = a.take()
        same("once", a.take() is first, True)
        same("another", b.take().numel(), 2)
        booked = ledger.bytes_by_category()["communication_buffers"]
        same("booked", booked, 40)
        for buffer in (b, a, a, other):
            buffer.give()
        held = ledger.bytes_by_category()["communication_buffers"]
        same("left", held, left + (8 if left else 0))
        storage = first.untyped_storage().nbytes()
        same("storage", storage, 0 if leaves == "tensor" else 32)
        again = a.take()
        same("again", again is first, same_object)
        same("refilled", again.untyped_storage().nbytes(), 32)
        same("other buffers", other.take() is again, False)
    ledger = MemoryLedger()
    weights = DBuffer(_row("a", 4, "compute_weights"), Allocator(streams, ledger))
    view = weights.take()[1:3]
    weights.give()
    same("until its last view is gone", ledger.bytes_by_category()["compute_weights"], 16)
    del view
    same("gone", ledger.bytes_by_category()["compute_weights"], 0)
    ledger = MemoryLedger()
    made = Allocators(AllocationConfig(), [], streams=streams, ledger=ledger)
    block = made.scratch("x", 3, torch.bfloat16)
    same("scratch", (block.data.numel(), block.data.dtype), (3, torch.bfloat16))
    block.give()
    same("given back", ledger.bytes_by_category()["communication_buffers"], 0)


def test_slots_go_from_unit_to_unit() -> None:
    """Homes, second homes, what blocks whom, and words where nothing is left."""
    streams, ledger = Streams(torch.device("cpu")), MemoryLedger()
    asked = [_row(f"{unit}/{n}", 8 - 4 * n) for unit in "abc" for n in (0, 1)]
    plan = plan_pool("fixed_pool", asked, 2)
    pool = SlotPool("grad_bucket", plan, streams=streams, ledger=ledger)
    a, a1, b, b1, c, _ = (DBuffer(row, pool) for row in asked)
    same("booked at once", ledger.bytes_by_category()["communication_buffers"], 2 * 48)

    a0 = a.take()
    same("zeros", bool((a0 == 0).all()), True)
    a0.zero_()
    same("changes counted for it alone", [a._version for a in pool._areas], [1, 0, 0, 0])
    same("an area", a0.data_ptr(), pool._areas[plan.area_of[asked[0]]].data_ptr())
    a1.take()
    b0 = b.take()
    same("holders", pool.holders(), {0: "a", 1: "b"})
    same("room", [pool.has_room(one) for one in (a, b1, c)], [True, True, False])
    same(
        "blocking",
        (pool.blocking("a"), sorted(pool.blocking("c")), pool.blocking("x")),
        ([], ["a", "b"], []),
    )
    refuses(PoolExhaustedError, "slot 0: unit a, slot 1: unit b", c.take)
    a.give()
    same("held by its other area", pool.has_room(c), False)
    a1.give()
    a1.give()
    same("idle", (pool.has_room(c), pool.blocking("c")), (True, []))
    c.take()
    same("slots", [pool.assigned_slot(u) for u in "abcd"], [0, 1, 0, None])
    same("its slot is taken", (pool.has_room(a), pool.blocking("a")), (False, ["c"]))
    refuses(PoolExhaustedError, "only slot 0 will do", lambda: a.take(in_place=True))
    b.give()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        moved = a.take()
    assert "unit a had slot 0" in str(said[0].message), said
    same("the other slot", moved.data_ptr(), b0.data_ptr())
    a.give()
    c.give()
    same("the same object", b.take() is b0, True)
    b.give()
    pool.forget_assignments()
    same("home again", a.take().data_ptr(), a0.data_ptr())
    alive = {(b.bucket, b.count_bytes) for b in ledger.alive() if b.in_pool}
    same("in use", alive, {("a/0", 32)})
    same("pool and nothing else", ledger.bytes_by_category()["communication_buffers"], 96)


class _Spare(Unit):
    """With a parameter that its forward pass leaves out. fails: in its backward pass."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fails:
            out.register_hook(_fail)
        return out


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_gradients_take_memory_from_the_first_one_to_zero_grad(strategy: int) -> None:
    """Not before, nor between steps. A pool, with which no buffer moves, keeps it."""
    for allocator, stays in (("storage_resize", False), ("fixed_pool", True)):
        model, _ = pair(strategy, allocator=allocator)
        found = []
        for number in range(2):
            found.append(model.ledger.bytes_by_category()["gradients"])
            model(batch(number)).backward()
            held = model.ledger.bytes_by_category()["gradients"]
            model.zero_grad()
        elements = sum(bucket.elements for bucket in model.buckets())
        same("until then", held, 8 * elements // (1 if strategy < 2 else 2))
        same(f"between steps with {allocator}", found, [held if stays else 0] * 2)
        model(batch()).backward()
        model.zero_grad(set_to_none=False)
        same("as zeros", model.ledger.bytes_by_category()["gradients"], held)


class _Keep(torch.autograd.Function):
    """Autograd alone holds the second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.clone()


@pytest.mark.parametrize("main_grads", [torch.float64, torch.float32])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_a_gradient_kept_over_zero_grad_keeps_its_numbers(
    strategy: int, main_grads: torch.dtype
) -> None:
    """As with plain torch, while later steps compute others. In FP32 it is a cast copy."""
    policy = MixedPrecisionPolicy(None, main_grads_dtype=main_grads)
    model, _ = pair(strategy, mixed_precision_policy=policy)
    model(batch(0)).backward()
    first, second, third, *_ = model.parameters()
    before = [mfsdp_core.gather_full(p.grad).clone() for p in (first, third)]
    shard, local, rows = first.grad, second.grad.to_local(), second.grad.to_local().clone()
    kept: Any = _Keep.apply(torch.ones(1, requires_grad=True), third.grad)
    for number in (1, 2):
        model.zero_grad()
        model(batch(number)).backward()
    same("kept rows", local, rows)
    found = (shard, *kept.grad_fn.saved_tensors)
    same("kept", [mfsdp_core.gather_full(gradient) for gradient in found], before)


@pytest.mark.parametrize("allocator", ["storage_resize", "fixed_pool"])
@pytest.mark.parametrize("strategy", [2, 3])
def test_gradients_that_are_cast_copies_are_those_of_plain_torch(
    strategy: int, allocator: str
) -> None:
    """Kept over `zero_grad` with a pool as well, and added to as the user has changed them."""
    policy = MixedPrecisionPolicy(None, main_grads_dtype=_FP32)
    model, plain = pair(strategy, mixed_precision_policy=policy, allocator=allocator)
    model(batch(3)).backward()
    kept = [parameter.grad.to_local() for parameter in model.parameters()]
    before = [gradient.clone() for gradient in kept]
    model.zero_grad()
    model(batch(0)).backward()
    plain_backward(plain, 0)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.grad.mul_(0.5)
    model(batch(1)).backward()
    plain_backward(plain, 1)
    compare_gradients(model, plain, 1e-5)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.grad.zero_()  # as an optimizer of torch's, which nobody wrapped, does
    model(batch(2)).backward()
    plain_backward(plain, 2)
    compare_gradients(model, plain, 1e-5)
    same("kept", kept, before)


def _fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError


class _Deep(Small):
    unit_classes = (Unit,)

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit() if n % 2 else _Spare() for n in range(5)])


def test_gradients_of_two_units_take_memory_at_a_time() -> None:
    """One being filled and one under way, however deep; also after passes that raised."""
    for strategy, options in ((2, {"allocator": "max_pool"}), (3, {})):
        model, plain = pair(strategy, _Deep, **options)
        alive: set[Any] = set()
        most: list[int] = []

        def note(booking: Any, alive: set[Any] = alive, most: list[int] = most) -> None:
            if booking.role == "grad_bucket" and "units" in booking.bucket:
                (alive.add if booking.count_bytes > 0 else alive.discard)(booking.bucket)
                most.append(len({name.rpartition("/")[0] for name in alive}))

        model.ledger.subscribe(note)
        for number, failing in enumerate((None, 2, None, 0, 4, None, None)):
            if failing is not None:
                model.module.units[failing].fails = True
                refuses(ZeroDivisionError, "", model(batch(number)).backward)
                model.module.units[failing].fails = False
                model.zero_grad()
                same("nothing is left", alive, set())
                refuses(RuntimeError, "", model.module.units[1], torch.ones(2))
                continue
            most.clear()
            model(batch(number)).backward()
            plain_backward(plain, number)
            compare_gradients(model, plain)
            same("units at once", (max(most), alive), (2, set()))
            model.zero_grad()
            plain.zero_grad()
        refuses(RuntimeError, "", model.module.units[1], torch.ones(2))
        for number in range(3):
            most.clear()
            x = batch(number)
            for unit in model.module.units:
                x = unit(x)
            x.square().mean().backward()
            same("at most three units, called one by one", max(most) <= 3, True)
            model.zero_grad()


class _Made(TorchDispatchMode):
    """Notes what is made without values: dtype and elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty):
            self.found.add((made.dtype, made.numel()))
        return made


def test_sums_of_another_dtype_are_taken_where_they_belong() -> None:
    """Of BF16 on the wire, in FP32: no memory besides, and no copy from there."""
    policy = MixedPrecisionPolicy(_FP32, _FP32, torch.bfloat16)
    options: dict[str, Any] = {"mixed_precision_policy": policy, "transport": "point_to_point"}
    for strategy in (1, 2, 3):
        model, _ = pair(strategy, dtype=_FP32, **options)
        slices = {bucket.elements // 2 for bucket in model.buckets()}
        for number in range(2):
            loss = model(batch(number, dtype=_FP32))
            with _Made() as made:
                loss.backward()
            model.zero_grad(set_to_none=False)
        # The second time: gradients have their memory then.
        beside = {elements for dtype, elements in made.found if dtype == _FP32}
        same(f"strategy {strategy}", beside & slices, set())


class _Wide(nn.Linear):
    """A unit that is alone in its shape, so that a fixed pool has no slot for it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class _Mixed(Small):
    """Two units alike and another one."""

    unit_classes = (Unit, _Wide)

    def __init__(self) -> None:
        super().__init__()
        self.units.append(_Wide())


def test_plans_of_pools_are_told_as_data() -> None:
    """Every bucket, where it is and what it wastes."""
    for options, elsewhere in (
        ({}, "storage_resize"),
        ({"allocator": "temporary"}, "temporary"),
        ({"allocator": "fixed_pool"}, "storage_resize"),
        ({"allocator": "fixed_pool", "fsdp_db_use_persist_buf_on_alloc_fail": True}, "persistent"),
    ):
        model, plain = pair(3, _Mixed, **options)
        model(batch(0)).backward()
        plain_backward(plain, 0)
        compare_gradients(model, plain)
        told = model.pool_plan
        same("allocator", told["allocator"], options.get("allocator", "storage_resize"))
        by_bucket = {(u["role"], u["bucket"]): u for u in told["units"]}
        sizes = {b.name: b.elements * 8 for b in model.buckets()}
        for (role, bucket), unit in by_bucket.items():
            same("bytes", unit["bytes"], sizes[bucket])
            used = sum(
                p.numel()
                for n, p in plain.named_parameters()
                if n in {m for b in model.buckets() if b.name == bucket for m in b.parameters}
            )
            same("padding", unit["padding_bytes"], sizes[bucket] - 8 * used)
            pooled = "pool" in told["allocator"] and not bucket.startswith(("(root)", "units.2"))
            place = unit["placement"]
            if pooled:
                pool = next(p for p in told["pools"] if p["role"] == role)
                same("slot", (place, unit["slot"] in range(pool["slots"])), ("pool", True))
                areas = [
                    (o, a["bytes"]) for o, a in zip(pool["offsets"], pool["areas"], strict=True)
                ]
                size = dict(areas)[unit["offset_bytes"]]
                same("waste", unit["waste_bytes"], size - unit["bytes"])
                same("of a pool", pool["bytes"], pool["slots"] * sum(s for _, s in areas))
            elif role == "compute_weights" or "pool" in told["allocator"]:
                same("elsewhere", (place, unit["slot"]), (elsewhere, None))
            else:
                same("gradients", place, "temporary")
        same("pools", bool(told["pools"]), "pool" in told["allocator"])


def test_events_reach_who_asked() -> None:
    """By kind, until the subscription ends."""
    bus = EventBus()
    seen: list[Event] = []
    all_of_them: list[Event] = []
    event = Event("collective", "all_gather", "float32", 8, "inner", 2, "b")
    same("nobody", "collective" in bus.wanted, False)
    end = bus.subscribe(seen.append, kinds=("land",))
    bus.subscribe(all_of_them.append)
    same(
        "wants",
        [k in bus.wanted for k in ("land", "collective", "enter", "read")],
        [True, True, False, False],
    )
    bus.publish(event)
    end()
    end()
    bus.publish(Event("land", "copy", "float32", 8, "inner", 2, "b"))
    same("seen", (len(seen), len(all_of_them)), (0, 2))
    log = WireLog(capacity=3)
    for number, (operation, sent) in enumerate(
        (("all_gather", 6), ("reduce_scatter", 6), ("broadcast", 6), ("all_reduce", 12))
    ):
        log(Event("collective", operation, "float32", 8, "inner", 4, f"{number}"))
        same(operation, list(log)[-1].sent_bytes, sent)
    same("kept", [record.bucket for record in log], ["1", "2", "3"])
    same(
        "all", (log.sent_bytes, log.gathered_bytes["float32"], log.counts["broadcast"]), (30, 6, 1)
    )
