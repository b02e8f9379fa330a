"""What a training loop may do with the wrapped model, beside plain torch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    PREFIX,
    WIDTH,
    Recomputing,
    Small,
    Unit,
    batch,
    compare_gradients,
    compare_weights,
    pair,
    plain_backward,
    whole_weights,
)
from mfsdp_core.errors import LifecycleError, PolicyChangeError, StateDictError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_BF16, _FP32 = torch.bfloat16, torch.float32


def test_the_last_microbatch_may_be_said_in_four_ways() -> None:
    """By `sync`, by auto-sync, by the attribute, and by hand afterwards."""
    for strategy, ways in (
        (0, ("sync", "start")),
        (1, ("sync", "model_auto_sync", "is_last_microbatch", "finish")),
        (3, ("start", "is_last_microbatch")),
    ):
        for way in ways:
            model, plain = pair(strategy, sync_model_each_microbatch=False)
            same("said", (model.is_last_microbatch, model.model_auto_sync), (False, False))
            model(batch(0)).backward()
            same("seen", (model.microbatch_count, model.backward_seen), (1, True))
            assert all(p.grad is None for p in model.parameters()), "gradients before the end"
            if way == "sync":
                with model.sync():
                    same("inside", model.is_last_microbatch, True)
                    with model.no_sync():
                        same("innermost", model.is_last_microbatch, False)
                    model(batch(1)).backward()
                same("behind", model.is_last_microbatch, False)
            elif way in ("model_auto_sync", "is_last_microbatch"):
                setattr(model, way, True)
                same("said", getattr(model, way), True)
                model(batch(1)).backward()
                setattr(model, way, False)
                same("taken back", getattr(model, way), False)
            else:
                model(batch(1)).backward()
                _finish_by_hand(model, plain if way == "start" else None)
            same("counted", model.microbatch_count, 0)
            plain.zero_grad()
            plain_backward(plain, 0, 1)
            compare_gradients(model, plain)
            model.finish_grad_sync(force_all_reduce=True)
            compare_gradients(model, plain)
            model.microbatch_count = 7
            same("set", model.microbatch_count, 7)
            model.zero_grad_buffer()
            same("a new cycle", (model.microbatch_count, model.backward_seen), (0, False))


def _finish_by_hand(model: Any, plain: nn.Module | None) -> None:
    """plain: in steps, of which the last one hands over gradients as plain torch's."""
    if plain is not None:
        model.start_grad_sync()
        counts = model.wire_log.counts
        reductions = counts["reduce_scatter"] + counts["all_reduce"]
        assert reductions >= sum(b.trainable for b in model.buckets()), "nothing was issued"
        model.synchronize_gradient_reduce()
        assert all(p.grad is None for p in model.parameters()), "attached too early"
        model.attach_grad_to_optimizer_state()
        plain_backward(plain, 0, 1)
        compare_gradients(model, plain)
        same("issued again", counts["reduce_scatter"] + counts["all_reduce"], reductions)
    model.finish_grad_sync()


def test_gradients_are_scaled_and_cleared() -> None:
    """Before and after they are attached, in their own dtype and cast; zeros where wanted."""
    policies = (
        (torch.float64, mfsdp_core.MixedPrecisionPolicy(None), 1e-11),
        (_BF16, mfsdp_core.MixedPrecisionPolicy(_FP32, _BF16, _BF16), 3e-2),
        (_BF16, mfsdp_core.MixedPrecisionPolicy(_FP32, _FP32, _BF16), 3e-2),
    )
    for (dtype, policy, allowed), strategies in zip(policies, ((3,), (1,), (0, 2)), strict=True):
        for strategy in strategies:
            model, plain = pair(strategy, dtype=dtype, mixed_precision_policy=policy)
            with model.no_sync():
                model(batch(0, dtype=dtype)).backward()
            model.scale_gradients(0.5)
            plain_backward(plain, 0, times=0.5)
            compare_gradients(model, plain, allowed)
            model.scale_gradients(0.5)
            for p in plain.parameters():
                p.grad = None if p.grad is None else p.grad / 2
            compare_gradients(model, plain, allowed)
            model.zero_grad(set_to_none=False)
            for name, p in model.named_parameters():
                whole = mfsdp_core.gather_full(p.grad)
                same(f"zeros of {name}", whole, torch.zeros_like(whole))
            plain.zero_grad()
            model(batch(1, dtype=dtype)).backward()
            plain_backward(plain, 1)
            compare_gradients(model, plain, allowed)
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters()), "gradients after zero_grad"
            same("unused", model.ledger.bytes_by_category()["communication_buffers"], 0)


def test_the_wire_dtype_changes_for_a_block() -> None:
    """And is refused where buffers cannot follow."""
    model, plain = pair(2, dtype=_FP32, sync_model_each_microbatch=False)
    policy = dataclasses.replace(model.mp_policy, grad_comm_dtype=_BF16)
    with model.mixed_precision_context(policy):
        same("in force", model.mp_policy.grad_comm_dtype, _BF16)
        model.wire_log.clear()
        with model.sync():
            model(batch(dtype=_FP32)).backward()
        found = {r.dtype for r in model.wire_log if r.operation == "reduce_scatter"}
        same("on the wire", found, {"bfloat16"})
    plain_backward(plain, 0)
    compare_gradients(model, plain, 1e-2)
    same("afterwards", model.mp_policy.grad_comm_dtype, None)
    model.zero_grad_buffer()
    plain.zero_grad()
    with model.sync():
        model(batch(dtype=_FP32)).backward()
    plain_backward(plain, 0)
    compare_gradients(model, plain, 1e-6)
    pooled, _ = pair(3, dtype=_FP32, fsdp_double_buffer=True)
    refuses(PolicyChangeError, "buffer pools", lambda: pooled.reset_mixed_precision_policy(policy))
    pooled.reset_mixed_precision_policy(pooled.mp_policy)


def _fail_within(model: Any, block: AbstractContextManager[None]) -> None:
    with block:
        model(batch(5, dtype=_FP32)).backward()
        raise ZeroDivisionError


def test_a_block_that_raises_leaves_the_model_as_it_was() -> None:
    """Two cycles behind it are those of plain torch; the microbatch inside of it is dropped."""
    for block in ("no_sync", "sync", "mixed_precision_context"):
        model, plain = pair(2, dtype=_FP32)
        policy = dataclasses.replace(model.mp_policy, grad_comm_dtype=_BF16)
        given = (policy,) if block == "mixed_precision_context" else ()
        before = model.is_last_microbatch, model.mp_policy
        refuses(ZeroDivisionError, "", _fail_within, model, getattr(model, block)(*given))
        same(f"behind {block}", (model.is_last_microbatch, model.mp_policy), before)
        for cycle in range(2):
            model.zero_grad()
            plain.zero_grad()
            model(batch(cycle, dtype=_FP32)).backward()
            plain_backward(plain, cycle)
            compare_gradients(model, plain, 1e-6)


def test_a_sharded_model_stays_what_it_is() -> None:
    """Casts, copies, exchanged parameters and lost changes are refused; what is harmless is not."""
    model, plain = pair()
    same("no change", model.to("cpu").double() is model, True)
    for part in (model, model.module, model.module.units[0].up):
        refuses(LifecycleError, "cannot change its dtype", part.half)
    refuses(LifecycleError, "cannot be copied", lambda: copy.deepcopy(model))
    weight = model.module.units[0].up.weight
    whole = whole_weights(model)["units.0.up.weight"]
    for wrong in (whole, weight.detach().float(), model.module.scale.detach()):
        refuses(LifecycleError, "was assigned", setattr, weight, "data", wrong)
    weight.data = weight.detach() * 2
    with torch.no_grad():
        plain.units[0].up.weight.mul_(2)
    model(batch()).backward()
    plain_backward(plain, 0)
    compare_gradients(model, plain)
    compare_weights(model, plain)
    model.zero_grad()
    model.module.units[0].up.weight = nn.Parameter(torch.zeros_like(whole))
    refuses(LifecycleError, "in its place", lambda: model(batch()))
    model.module.units[0].up.weight = weight
    weight.requires_grad_(False)
    refuses(LifecycleError, "Freeze or unfreeze", lambda: model(batch()))
    weight.requires_grad_(True)
    loss = model.module.scale.full_tensor().sum()
    refuses(LifecycleError, "full_tensor() of a sharded parameter", loss.backward)
    beside = model(batch()) + model.module.scale.to_local().sum()
    refuses(LifecycleError, "outside of the model's forward", beside.backward)
    model.zero_grad()
    model.module.scale.grad = model.module.scale.detach().clone()
    refuses(LifecycleError, "not the reduced one", lambda: model(batch()).backward())
    model.zero_grad()
    model(batch()).backward()
    plain.zero_grad()
    plain_backward(plain, 0)
    compare_gradients(model, plain)


def test_states_are_loaded_whole_or_not_at_all() -> None:
    """Names, shapes, kinds; parts; shards; buffers."""
    model, plain = pair()
    before = whole_weights(model)
    other = {PREFIX + n: v.detach() + 1 for n, v in plain.state_dict().items()}
    first, last = next(iter(other)), "module.scale"

    def without(name: str, **more: Any) -> dict[str, Any]:
        return {n: v for n, v in other.items() if n != name} | more

    for words, state in (
        ("Missing: ['module.scale']", without(last)),
        ("Missing: ['module.shift']", without("module.shift")),
        ("Unexpected: ['module.more']", other | {"module.more": torch.ones(2)}),
        ("expected shape", other | {last: torch.ones(WIDTH + 1)}),
        ("expected shape (5,), found (6,)", other | {"module.shift": torch.ones(WIDTH + 1)}),
        ("found list", other | {last: [1.0]}),
        ("found float", other | {"module.shift": 1.0}),
    ):
        refuses(StateDictError, words, model.load_state_dict, state)
    bare = {n.removeprefix(PREFIX): value for n, value in other.items()}
    for words, state, strict in (
        ("no name of the state dict is one of the model", {"other": torch.ones(1)}, False),
        ("load {'module.' + name: value", bare, False),
        ("load {'module.' + name: value", bare, True),
    ):
        refuses(StateDictError, words, lambda s=state, t=strict: model.load_state_dict(s, t))
    same("of nothing", model.load_state_dict({}, strict=False).unexpected_keys, [])
    refuses(LifecycleError, "assign=True", lambda: model.load_state_dict(other, assign=True))
    same("nothing was changed", whole_weights(model), before)
    result = model.load_state_dict(without(first), strict=False)
    same("missing", (result.missing_keys, result.unexpected_keys), ([first], []))
    expected = {n: before[n] + (PREFIX + n != first) for n in before}
    same("a part", whole_weights(model), expected)
    own = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict(other)
    same("whole", whole_weights(model), {n: v + 1 for n, v in before.items()})
    same("a buffer", model.module.shift, torch.full((WIDTH,), 1.25, dtype=torch.float64))
    model.load_state_dict(own)
    same("shards", whole_weights(model), expected)
    for name, p in plain.named_parameters():
        p.data.copy_(expected[name])
    plain.shift.add_(1)
    model(batch()).backward()
    plain_backward(plain, 0)
    compare_gradients(model, plain)


def test_without_bucketing_every_weight_travels_alone() -> None:
    """And with it some share a bucket."""
    for strategy, alone in itertools.product(range(4), (True, False)):
        model, plain = pair(strategy, disable_bucketing=alone)
        model(batch()).backward()
        plain_backward(plain, 0)
        compare_gradients(model, plain)
        sent = len({record.bucket for record in model.wire_log})
        weights = len(list(plain.parameters()))
        assert sent == weights if alone else sent < weights, (strategy, alone, sent)


def _begin(begun: list[str], name: str) -> str:
    begun.append(name)
    return name


def test_what_travels_is_logged_and_told() -> None:
    """Events up to the end of a subscription; ranges of units and collectives."""
    model, _ = pair()
    events: list[Any] = []
    end = model.events.subscribe(events.append, kinds=("collective", "land", "enter", "leave"))
    begun: list[str] = []
    ended: list[str] = []
    late: list[list[str]] = []

    def behind(event: Any) -> None:
        if (event.operation, event.bucket) == ("backward", "units.1"):
            late.append([n for n in begun if n.startswith("backward") and n not in ended])

    with mfsdp_core.annotated(model, partial(_begin, begun), ended.append):
        unsubscribe = model.events.subscribe(behind, kinds=("leave",))
        model(batch()).backward()
        unsubscribe()
        same("the next unit's range has begun by then, and goes on", late, [["backward units.0"]])
        still = [name for name in begun if name not in ended]
        same("open", [n for n in still if n.startswith(("forward", "backward"))], [])
    same("ranges", sorted(begun), sorted(ended))
    for wanted in (
        "forward units.0",
        "backward units.1",
        "forward root",
    ):
        assert wanted in begun, f"{wanted} is not among {begun}"
    collectives = ("all_gather of units.0/0", "reduction of units.1/0")
    same("in forward and backward", [begun.count(name) for name in collectives], [2, 1])
    count = len(model.wire_log)
    same("logged", count, sum(e.kind == "collective" for e in events))
    same("counts", sum(model.wire_log.counts.values()), count)
    payload = sum(r.payload_bytes for r in model.wire_log)
    same("bytes", model.wire_log.sent_bytes, payload // 2)
    landed = [e.bucket for e in events if e.kind == "land"]
    same("landed", sorted(landed), sorted(b.name for b in model.buckets()))
    entered = [(e.operation, e.bucket) for e in events if e.kind == "enter"]
    wanted_order = [
        ("forward", ""),
        ("forward", "units.0"),
        ("forward", "units.1"),
        ("backward", "units.1"),
        ("backward", "units.0"),
    ]
    same("entered", [e for e in entered if e != ("backward", "")], wanted_order)
    end()
    seen = len(events)
    model(batch(1)).backward()
    same("ended", len(events), seen)
    model.wire_log.clear()
    left = (len(model.wire_log), model.wire_log.sent_bytes, sum(model.wire_log.counts.values()))
    same("cleared", left, (0, 0, 0))
    same("by dtype", sum(model.wire_log.gathered_bytes.values()), 0)


def test_recomputation_is_a_range_of_its_own() -> None:
    """Beside the forward pass of its unit, and behind the block nothing begins."""
    model, _ = pair(3, Recomputing, transport="native")
    begun: list[str] = []
    ended: list[str] = []
    with mfsdp_core.annotated(model, partial(_begin, begun), ended.append):
        model(batch()).backward()
    once = ("forward units.0", "recompute units.0", "reduce_scatter of units.1/0")
    same("each once", [begun.count(name) for name in once], [1, 1, 1])
    same("all end", sorted(begun), sorted(ended))
    model(batch())
    same("over", len(begun), len(ended))


class _Spare(Unit):
    """With a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.empty(3))


class _Sparing(Small):
    unit_classes = (Unit, _Spare)

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(), Unit(), _Spare()])


def test_unused_weights_hold_no_reduction_up() -> None:
    """A unit whose weight gets no gradient is reduced as soon as the backward pass is past it."""
    model, _ = pair(3, _Sparing)
    seen: list[tuple[str, str]] = []
    model.events.subscribe(
        lambda e: seen.append((e.operation, e.bucket)), kinds=("collective", "enter")
    )
    model(batch()).backward()
    reduced, later = seen.index(("reduce_scatter", "units.2/0")), ("backward", "units.0")
    assert reduced < seen.index(later), f"units.2 is reduced behind {later}: {seen}"


class _Coded(nn.Module):
    """A weight of the root's and one of a unit, wide enough for blocks of 32."""

    unit_classes = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))
        self.unit = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.unit(x @ self.weight).square().mean())


def test_codes_gathered_ahead_are_those_of_the_forward_pass() -> None:
    """Of the root as of the first unit: the pass behind it gathers nothing again."""
    policy = mfsdp_core.MixedPrecisionPolicy(
        _FP32, weight_codec=mfsdp_core.Float8Reference("mxfp8")
    )
    model, _ = pair(3, _Coded, _BF16, mixed_precision_policy=policy)
    model.start_param_sync()
    with torch.no_grad():
        model(torch.ones(2, 32, dtype=_BF16))
    gathered = [(r.bucket, r.payload_bytes) for r in model.wire_log]
    same("each once", len(gathered), 2 * len(model.buckets()))


def test_weights_gathered_ahead_are_used() -> None:
    """`start_param_sync` with and without waiting; test_late_bugs.py has it before a step."""
    for options in ({}, {"enable_fine_grained_param_gather": True}):
        model, plain = pair(3, **options)
        for force in (False, True):
            model.wire_log.clear()
            model.start_param_sync(force_sync=force)
            assert model.wire_log.counts["all_gather"] >= 1, "nothing was gathered"
            model.synchronize_param_gather()
            close("loss", model(batch()).detach(), plain(batch()).detach())
