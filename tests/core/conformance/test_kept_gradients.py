"""Gradients that the user keeps or removes within a cycle are what plain torch leaves there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import mfsdp_core
from conformance.judging import same
from conformance.small_model import (
    Small,
    batch,
    compare_gradients,
    compare_weights,
    pair,
    plain_backward,
)
from mfsdp_core import MixedPrecisionPolicy, gather_full
from mfsdp_core.fsdp2 import FSDPModule, fully_shard

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_CAST = MixedPrecisionPolicy(None, main_grads_dtype=torch.float32)
#: Strategy, whether on the host, policy, allocator.
WAYS = [
    *product((2, 3), (False, True), (MixedPrecisionPolicy(None), _CAST), ("storage_resize",)),
    (3, False, MixedPrecisionPolicy(None), "fixed_pool"),
    (2, False, _CAST, "fixed_pool"),
]


def _of_fsdp2(strategy: int, offload: bool) -> tuple[Any, Any]:
    plain = pair(3)[1]
    model: Any = copy.deepcopy(plain)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else None
    for module in (*model.units, model):
        fully_shard(module, reshard_after_forward=strategy == 3, offload_policy=policy)
    return model, plain


def _models() -> Iterator[tuple[str, Any, Any]]:
    for strategy, offload, policy, allocator in WAYS:
        options = {"mixed_precision_policy": policy, "allocator": allocator, "offload": offload}
        yield f"{strategy} {options}", *pair(strategy, **options)
    for strategy, offload in product((2, 3), (False, True)):
        yield f"fsdp2 {strategy} {offload}", *_of_fsdp2(strategy, offload)


def _first(model: Any) -> Any:
    return next(p for name, p in model.named_parameters() if "units.0.down" in name)


def _pass(model: Any, plain: Any, number: int, *, last: bool = True) -> None:
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model(batch(number)).backward()
    else:
        with model.sync() if last else model.no_sync():
            model(batch(number)).backward()
    plain_backward(plain, number)


def test_a_gradient_that_is_kept_and_removed_keeps_its_numbers() -> None:
    """One, all of them, and over zero_grad; what was not removed is added to in its place."""
    for way, model, plain in _models():
        _pass(model, plain, 0)
        kept: list[Any] = [p.grad for p in model.parameters()]
        rows = [_first(model).grad.to_local(), kept[0].to_local()]
        numbers = [gather_full(g).clone() for g in kept]
        own = rows[0].clone()
        index = [p is _first(model) for p in model.parameters()].index(True)
        for of in (model, plain):
            _first(of).grad = None
        _pass(model, plain, 1, last=False)
        _pass(model, plain, 2)
        compare_gradients(model, plain, 1e-5)
        same(f"{way}: removed", gather_full(kept[index]), numbers[index])
        if "pool" not in way or "float32" in way:
            same(f"{way}: rows of it", rows[0], own)
        for at, p in enumerate(model.parameters()):
            same(f"{way}: is {at}", p.grad is kept[at], at != index)
        numbers = [gather_full(g).clone() for g in kept]
        for number in (3, 4):
            for p in (*model.parameters(), *plain.parameters()) if number == 3 else ():
                p.grad = None
            for of in (model, plain) if number == 4 else ():
                of.zero_grad()
            _pass(model, plain, number)
            compare_gradients(model, plain, 1e-5)
            for at, gradient in enumerate(kept):
                same(f"{way}: kept {at}", gather_full(gradient), numbers[at])


def test_a_gradient_that_is_removed_before_a_step_is_not_stepped() -> None:
    """Behind a pass that was not the last; passes behind its removal add up."""
    for (_, model, plain), removes_all in product(_models(), (False, True)):
        make = partial(torch.optim.SGD, lr=0.1)
        optimizers = [make(of.parameters()) for of in (model, plain)]
        if not isinstance(model, FSDPModule):
            mfsdp_core.fully_shard_optimizer(optimizers[0])
        for last, behind in ((False, 0), (True, 0), (True, 2)):
            _pass(model, plain, 0)
            if not last:
                _pass(model, plain, 1, last=False)
            for of in (model, plain):
                for p in of.parameters() if removes_all else [_first(of)]:
                    p.grad = None
            for number in range(behind):
                _pass(model, plain, 2 + number, last=number == 1)
            for optimizer in optimizers:
                optimizer.step()
            compare_weights(model, plain, 1e-5)
            for optimizer in optimizers:
                optimizer.zero_grad()


def test_zeros_that_are_changed_or_removed_are_gradients() -> None:
    """A pass adds to what was put there, and leaves what was kept."""
    for (way, model, plain), is_removed in product(_models(), (False, True)):
        _pass(model, plain, 0)
        kept = _first(model).grad
        for of in (model, plain):
            of.zero_grad(set_to_none=False)
            if is_removed:
                _first(of).grad = None
            else:
                _first(of).grad.add_(1.0)
        _pass(model, plain, 1)
        compare_gradients(model, plain, 1e-5)
        if is_removed:
            same(f"{way}: kept", bool(gather_full(kept).any()), False)


def test_zeros_that_are_zeroed_again_are_no_gradients() -> None:
    """By an optimizer that is not prepared, where gradients are whole and take one pass."""
    for strategy in (0, 1):
        model, plain = pair(strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _pass(model, plain, 0)
        for of in (model, optimizer, plain):
            of.zero_grad(set_to_none=False)
        _pass(model, plain, 1)
        compare_gradients(model, plain, 1e-5)


class _Branches(Small):
    def forward(self, x: Tensor, spares: bool = False) -> Tensor:
        """spares: leave out the second unit."""
        units = self.units[:1] if spares else self.units
        for unit in units:
            x = unit(x)
        return (x * self.scale + self.shift).square().mean()


def test_a_gradient_that_is_removed_and_not_used_again_stays_none() -> None:
    """Zeros would be stepped, with momentum and weight decay."""
    for strategy, offload in product((2, 3), (False, True)):
        model, plain = pair(strategy, _Branches, offload=offload)
        _pass(model, plain, 0)
        for of in (model.module, plain):
            of.units[1].up.weight.grad = None
            with model.no_sync():
                ranks = (None,) if of is model.module else (0, 1)
                for rank in ranks:
                    outer = model if of is model.module else plain
                    (outer(batch(1, rank), spares=True) / len(ranks)).backward()
        model.finish_grad_sync()
        compare_gradients(model, plain)


def test_a_step_warns_of_gradients_that_nobody_could_read_alone() -> None:
    for strategy, policy, spares in product((2, 3), (MixedPrecisionPolicy(None), _CAST), (0, 1)):
        model, _ = pair(strategy, _Branches, mixed_precision_policy=policy)
        for shown, removes in ((True, False), (True, True), (False, False)):
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            mfsdp_core.fully_shard_optimizer(optimizer)
            for number in range(2):
                with model.sync() if shown and not number else model.no_sync():
                    model(batch(number), spares=bool(spares)).backward()
                if removes and not number:
                    _first(model).grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.step()
            same(f"warned, {shown}, {removes}", len(said), int(removes or not shown))
            optimizer.zero_grad()
