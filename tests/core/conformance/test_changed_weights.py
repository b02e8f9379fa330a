"""Weights that the user changes between passes, by any way in, and what comes to a model later."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import prune

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    PREFIX,
    Stateful,
    batch,
    compare_gradients,
    compare_weights,
    name_of,
    pair,
    plain_backward,
    reread,
    train_beside,
    whole_weights,
)
from mfsdp_core.errors import ConfigurationError, LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_Change = Callable[[list[nn.Parameter]], object]


def _each(change: Callable[[nn.Parameter], object]) -> _Change:
    return lambda parameters: [change(p) for p in parameters]


def _set_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.5 + 0.25


def _swap(p: nn.Parameter) -> None:
    """As an average of weights is swapped in."""
    average = p.detach().clone() * 0.9
    p.data, average = average, p.data


def _fused(parameters: list[nn.Parameter]) -> None:
    """A step of an optimizer that is not sharded."""
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.Adam(parameters, lr=0.1, fused=True)
    optimizer.step()
    optimizer.zero_grad()


_CHANGES: dict[str, _Change] = {
    "in place": _each(lambda p: p.mul_(1.5)),
    "by data": _each(lambda p: p.data.sub_(0.125)),
    "by detach": _each(lambda p: p.detach().clamp_(-0.75, 0.75)),
    "data set": _each(_set_data),
    "all at once": lambda ps: torch._foreach_mul_(ps, 1.25),
    "averages at once": lambda ps: torch._foreach_lerp_(
        [p.detach() for p in ps], [torch.ones_like(p) for p in ps], 0.25
    ),
    "filled": _each(lambda p: nn.init.constant_(p, 0.375)),
    "copied": _each(lambda p: p.copy_(p.detach() * 2)),
    "one of them": lambda ps: ps[-1].add_(0.5),
    "swapped": _each(_swap),
    "by local": _each(lambda p: (p.to_local() if isinstance(p, DTensor) else p).sub_(0.1)),
    "by a fused optimizer": _fused,
}


def test_changes_reach_every_rank() -> None:
    """In evaluations and in training, of one copy and of weights computed in another dtype."""
    mixed = mfsdp_core.MixedPrecisionPolicy(torch.float32)
    every = list(_CHANGES.items())
    for strategy, changes, dtype, allowed, options in (
        (1, every[::2], torch.float64, 1e-11, {}),
        (3, every, torch.float64, 1e-11, {"enable_fine_grained_param_gather": True}),
        (0, every[1::2], torch.bfloat16, 5e-2, {"mixed_precision_policy": mixed}),
    ):
        model, plain = pair(strategy, dtype=dtype, **options)
        model(batch(0, dtype=dtype))
        for number, (what, change) in enumerate(changes):
            with torch.no_grad():
                for module in (model, plain):
                    change(list(module.parameters()))
            x = batch(number, dtype=dtype)
            with torch.no_grad():
                close(f"{what}: an evaluation", model(x), plain(x), allowed)
            model(x).backward()
            plain_backward(plain, number)
            compare_gradients(model, plain, allowed)
            model.zero_grad()
            plain.zero_grad()
        if dtype == torch.float64:  # a change that was lost stays lost
            compare_weights(model, plain)


def test_what_comes_later_is_refused_or_harmless() -> None:
    """An optimizer with such parameters; frozen ones take part as they are."""
    model, plain = pair(3)
    module = model.module
    unit = module.units[0]
    sgd, prepare = torch.optim.SGD, mfsdp_core.fully_shard_optimizer
    trained = prepare(sgd(model.parameters(), lr=0.1))
    for late in (
        lambda: setattr(module, "more", nn.Parameter(torch.zeros(2))),
        lambda: setattr(unit, "more", nn.Linear(2, 2)),
    ):
        late()
        words = "is not sharded"
        refuses(ConfigurationError, words, lambda: prepare(sgd(model.parameters(), lr=0.1)))
        holder = module if hasattr(module, "more") else unit
        delattr(holder, "more")
    module.more = nn.Parameter(torch.zeros(2))
    trained.add_param_group({"params": [module.more]})
    refuses(ConfigurationError, words, trained.step)
    del module.more
    prune.identity(unit.up, "weight")
    refuses(LifecycleError, "in its place", model, batch())
    prune.remove(unit.up, "weight")
    for one in (module, plain):
        one.nothing = None
        one.register_parameter("none", None)
        one.inner = nn.ModuleList()
        one.frozen = nn.Linear(2, 2).requires_grad_(False)
        one.units = nn.ModuleList(one.units)
    model(batch()).backward()
    plain_backward(plain, 0)
    wanted = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad:
            close(name, mfsdp_core.gather_full(p.grad), wanted[name_of(name)].grad)
    for part in (model, module, unit):
        with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
            torch.save(part, io.BytesIO())
    free = nn.Linear(2, 2)
    free.more = nn.Parameter(torch.zeros(2))


#: Ways in: of a whole value for the sharded tensor `like`.
_Way = Callable[[Tensor, DTensor], Tensor]


def _shard_of(whole: Tensor, like: DTensor) -> Tensor:
    """Placed as `like`, with memory of its own, by arithmetic on the shard alone."""
    made: Tensor = like.detach().clone()
    own = mfsdp_core.gather_full(like.detach())
    difference = (whole - own).flatten()[0] if whole.numel() else whole.sum()
    with torch.no_grad():
        made.add_(difference.item())
    return made


def _cut_by_torch(whole: Tensor, like: DTensor, placement: Any) -> Tensor:
    placements = [placement if like.ndim else Replicate()]
    return distribute_tensor(whole.reshape(like.shape), like.device_mesh, placements)


_WAYS: dict[str, _Way] = {
    "whole": lambda whole, _like: whole.clone(),
    "a shard": _shard_of,
    "a pickled shard": lambda whole, like: reread(_shard_of(whole, like)),
    "replicas": partial(_cut_by_torch, placement=Replicate()),
    "rows as torch cuts them": partial(_cut_by_torch, placement=Shard(0)),
}


def test_values_come_in_by_every_way() -> None:
    """Into weights and moments, a weight of shape () among them; training goes on with them."""
    for (what, way), strategies in zip(
        _WAYS.items(), ((1, 3), (3,), (3,), (0,), (3,)), strict=True
    ):
        for strategy in strategies:
            model, plain = pair(strategy, Stateful)
            reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
            optimizer = mfsdp_core.fully_shard_optimizer(
                torch.optim.AdamW(model.parameters(), lr=0.1)
            )
            train_beside(model, optimizer, plain, reference, 0, relative=1e-10)
            named = dict(model.named_parameters())
            with torch.no_grad():
                for p in plain.parameters():
                    p.add_(1)
            state: dict[str, Any] = {}
            for name, value in plain.state_dict().items():
                like = named.get(PREFIX + name)
                is_shard = isinstance(like, DTensor)
                state[PREFIX + name] = way(value, like) if is_shard else value
            if what in ("whole", "a shard"):  # a tied weight comes under any of its names
                del state[PREFIX + f"units.{int(what == 'a shard')}.up.weight"]
            model.load_state_dict(state)
            found = whole_weights(model)
            for name, p in plain.named_parameters():
                same(f"{strategy}, {what}: {name}", found[name], p.detach())
            optimizer.load_state_dict(_moments(optimizer, reference, way))
            train_beside(model, optimizer, plain, reference, 1, relative=1e-10)


def _moments(optimizer: Any, reference: Any, way: _Way) -> dict[str, Any]:
    """A state dict for `optimizer` with the reference's moments, one larger, by a way in."""
    for values in reference.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            values[name].add_(1)
    theirs, own = copy.deepcopy(reference.state_dict()), optimizer.state_dict()
    for number, values in theirs["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            like = own["state"][number][name]
            values[name] = way(values[name], like) if isinstance(like, DTensor) else values[name]
    return theirs
