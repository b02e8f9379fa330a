"""In the middle of a pass: what is gathered, reduced and whole when, and memory that nobody booked.

Between two passes all of this is as it was, so a look at rest misses it.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from bench.validate.scenario import live_bytes, set_aside, settled_bytes
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from oracle.ranks import mesh, on_two_axes
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

TOY = "aligned_stack"
UNITS, WIDTH, HIDDEN = 4, 16, 64
UNIT_BYTES = 8 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
#: Activations of all units; the weights of one, or their gradients, are four times as large.
SMALL_BYTES = 4000


@dataclass
class Look:
    """unbooked: bytes of tensors that exist and that the ledger does not have. whole: units.

    weights: bytes of whole weights that somebody holds, be it autograd, and those in the ledger.
    """

    where: str
    unbooked: int
    whole: tuple[int, ...]
    weights: tuple[int, int]


@dataclass
class Watch:
    """Called by units while they compute, and while their gradients are computed."""

    model: Any = None
    before: int = 0
    looks: list[Look] = field(default_factory=list)
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def look(self, where: str) -> None:
        if self.model is None:
            return
        booked = self.model.ledger.bytes_by_category()
        whole = []
        for number, unit in enumerate(self.model.module.units):
            if not isinstance(unit.up.weight, DTensor):
                storage = unit.up.weight.untyped_storage()
                whole += [number] if storage.nbytes() else []
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        alive = [ref for ref in self.storages.values() if not ref.expired()]
        held = sum(UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in alive)
        unbooked = live_bytes() - self.before - sum(booked.values())
        self.looks.append(Look(where, unbooked, tuple(whole), (held, booked["compute_weights"])))


class Unit(nn.Module):
    """Large weights, and activations that are small beside them."""

    def __init__(self, number: int, watch: Watch) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.number, self.watch = number, watch

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        self.watch.look(f"forward {self.number}")
        if x.requires_grad:
            x.register_hook(lambda _: self.watch.look(f"backward {self.number}"))
        return self.down(x)


class Model(nn.Module):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(number, watch) for number in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().sum()


def built(strategy: str, outer: str, watch: Watch, **switches: Any) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"device_mesh": mesh(2)["dp"]} if outer == "one axis" else {}
    if not arguments:
        arguments = on_two_axes(outer)
    torch.manual_seed(1)
    model: Any = fully_shard_model(
        Model(watch).double(),
        fsdp_unit_modules=[Unit],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        **arguments,
        **switches,
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(model: Any, optimizer: Any, between: Callable[[], None] = lambda: None) -> None:
    loss = model(torch.full((1, WIDTH), 0.5, dtype=torch.float64))
    between()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def looks_of_two_steps(strategy: str, outer: str, allocator: str = "storage_resize") -> list[Look]:
    """Of the second one: the first one makes what stays."""
    watch = Watch()
    set_aside()
    try:
        watch.before = live_bytes()
        model, optimizer = built(strategy, outer, watch, allocator=allocator)
        train(model, optimizer)
        watch.model = model
        train(model, optimizer, lambda: watch.look("between"))
    finally:
        gc.unfreeze()
    return watch.looks


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [
        ("no_shard", "one axis"),
        ("optim", "optim"),
        ("optim_grads", "no_shard"),
        ("optim_grads_params", "one axis"),
        ("optim_grads_params", "optim"),
    ],
)
def test_the_ledger_has_what_exists_in_the_middle_of_a_pass(strategy: str, outer: str) -> None:
    """Where weights come and go, of two units: the one that computes, and the next."""
    looks = looks_of_two_steps(strategy, outer)
    assert len(looks) == 2 * UNITS + 1
    wrong = [look for look in looks if abs(look.unbooked) > SMALL_BYTES]
    assert not wrong, wrong
    if strategy != "optim_grads_params":
        return
    last = UNITS - 1
    wanted = {f"forward {n}": {n, min(n + 1, last)} for n in range(UNITS)}
    wanted |= {"between": {last}} | {f"backward {n}": {n, max(n - 1, 0)} for n in range(UNITS)}
    found = {look.where: set(look.whole) for look in looks}
    assert all(found[where] <= units for where, units in wanted.items()), found
    assert all(int(where[-1]) in units for where, units in found.items() if "ward" in where)
    if outer == "one axis":  # gathered ahead or running; on two axes shards are booked as well
        assert max(look.weights[1] // UNIT_BYTES for look in looks) == 2, looks


@pytest.mark.parametrize("allocator", ["storage_resize", "temporary"])
def test_the_ledger_has_the_weights_that_autograd_holds(allocator: str) -> None:
    looks = looks_of_two_steps("optim_grads_params", "one axis", allocator)
    wrong = [look for look in looks if look.weights[0] > look.weights[1]]
    assert not wrong, wrong
    assert max(look.weights[0] for look in looks) >= UNIT_BYTES, looks


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_loading_keeps_nothing_of_what_was_loaded(strategy: str) -> None:
    """Nor do two steps after it hold more.

    A loaded optimizer's state is the new one, as in torch.
    """
    set_aside()
    try:
        model, optimizer = built(strategy, "one axis", Watch())
        train(model, optimizer)
        gc.collect()
        before = live_bytes()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        refs = {name: weakref.ref(value) for name, value in state.items()}
        model.load_state_dict(state)
        del state
        assert [name for name, ref in refs.items() if ref() is not None] == []
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            train(model, optimizer)
        gc.collect()
        more = settled_bytes((), before + SMALL_BYTES - 1) - before
        assert more < SMALL_BYTES, more
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_show_shards_whenever_no_pass_runs(strategy: str) -> None:
    toy = shard(TOY, strategy, 2)

    def are_shards() -> bool:
        return all(isinstance(p, DTensor) for p in toy.model.parameters())

    assert are_shards()
    value = toy.forward()
    assert are_shards()
    value.backward()
    assert are_shards()
