"""Optimizers that need whole tensors step as in one process, whatever the sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    Small,
    Stateful,
    Unit,
    batch,
    compare_weights,
    name_of,
    pair,
    plain_backward,
)
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.state import whole_matrices

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_OPTIM = torch.optim
_MUON = partial(_OPTIM.Muon, lr=0.05, weight_decay=0.1)


class LeftAndRight(_OPTIM.Optimizer):
    """Keeps what torch's do not: a matrix of another shape, a count and a tensor of no shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Two factors per matrix, as Shampoo has them."""
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(left=p.new_zeros(len(p), len(p)), mean=torch.zeros_like(p))
                    state.update(seen=0, step=torch.tensor(0.0))
                flat = p.grad.reshape(len(p), -1)
                state["left"] += flat @ flat.T
                state["mean"].lerp_(p.grad, 0.3)
                state["seen"] += 1
                state["step"] += 1
                scale = 1 + state["left"].trace() + state["seen"] + state["step"]
                p.sub_(state["mean"] / scale + group["lr"] * p / p.norm())


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if name_of(n).endswith("weight")]


def _rest(model: nn.Module) -> list[nn.Parameter]:
    taken = set(map(id, _matrices(model)))
    return [p for p in model.parameters() if id(p) not in taken]


def _shard(model: Any, make: Callable[[Any], Any]) -> list[Any]:
    """Two optimizers: `make` for matrices, AdamW for the rest."""
    wrap = mfsdp_core.fully_shard_optimizer
    whole = wrap(make(_matrices(model)), whole_matrices=True)
    return [whole, wrap(_OPTIM.AdamW(_rest(model), lr=0.01))]


def _plain(model: Any, make: Callable[[Any], Any]) -> list[Any]:
    return [make(_matrices(model)), _OPTIM.AdamW(_rest(model), lr=0.01)]


def _train(model: Any, own: list[Any], plain: Any, reference: list[Any], *steps: int) -> None:
    for step in steps:
        model(batch(step)).backward()
        plain_backward(plain, step)
        for one in [*own, *reference]:
            one.step()
        for one in [*own, *reference]:
            one.zero_grad()
    compare_weights(model, plain, 1e-6)


def _state(plain: Any, reference: Any, model: Any, optimizer: Any) -> None:
    """State dict of both, entry by entry."""
    optimizer.state_dict()
    wanted = {n: reference.state[p] for n, p in plain.named_parameters() if p in reference.state}
    for name, parameter in model.named_parameters():
        for key, value in wanted.get(name_of(name), {}).items():
            found = optimizer.state[parameter][key]
            if isinstance(value, Tensor):
                close(f"{key} of {name}", mfsdp_core.gather_full(found), value, 1e-6)
            else:
                same(f"{key} of {name}", found, value)


@pytest.mark.parametrize("make", [_MUON, partial(_OPTIM.Adafactor, lr=0.05), LeftAndRight])
def test_steps_and_state_are_those_of_one_process(make: Any) -> None:
    for strategy in range(4):
        model, plain = pair(strategy)
        own, reference = _shard(model, make), _plain(plain, make)
        _train(model, own, plain, reference, 0, 1)
        _state(plain, reference[0], model, own[0])
        _train(model, own, plain, reference, 2)


@pytest.mark.parametrize("make", [_MUON, partial(_OPTIM.Adafactor, lr=0.05)])
def test_rounds_change_no_bit_and_bound_what_is_whole(make: Any, monkeypatch: Any) -> None:
    found: list[list[Tensor]] = []
    stand_ins = whole_matrices.WholeStep._stand_ins
    for size, wanted in ((1 << 25, {2}), (1, {1})):
        counts: set[int] = set()

        def counted(self: Any, stepping: Any, counts: set[int] = counts) -> Any:
            made = stand_ins(self, stepping)
            counts.add(len(made))
            return made

        monkeypatch.setattr(whole_matrices, "ROUND_BYTES", size)
        monkeypatch.setattr(whole_matrices.WholeStep, "_stand_ins", counted)
        model, plain = pair(3)
        _train(model, _shard(model, make), plain, _plain(plain, make), 0, 1, 2)
        same("whole at a time", counts, wanted)
        found.append([mfsdp_core.gather_full(p.detach()) for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.on_ranks(1)
def test_on_one_rank() -> None:
    model, plain = pair(3)
    _train(model, _shard(model, LeftAndRight), plain, _plain(plain, LeftAndRight), 0, 1)


def test_who_needs_whole_matrices_cannot_do_without() -> None:
    model, _ = pair(3)
    wrap = partial(mfsdp_core.fully_shard_optimizer, whole_matrices=False)
    refuses(ConfigurationError, "leave it out", lambda: wrap(_OPTIM.Muon(_matrices(model))))
    model, _ = pair(3, use_decoupled_grad=True)
    wrap = partial(mfsdp_core.fully_shard_optimizer, whole_matrices=True)
    for make in (_OPTIM.Muon, LeftAndRight):
        refuses(ConfigurationError, "would be trained", wrap, make(_matrices(model)))


def test_tied_weights_and_uneven_rows() -> None:
    model, plain = pair(3, Stateful)
    _train(model, _shard(model, LeftAndRight), plain, _plain(plain, LeftAndRight), 0, 1)


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("outer", [0, 1])
def test_on_two_axes(outer: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, plain = pair(
        3,
        device_mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        hybrid_fsdp_group=mesh["outer", "inner"]._flatten().get_group(),
        outer_dp_sharding_strategy=outer,
    )
    own, reference = _shard(model, LeftAndRight), _plain(plain, LeftAndRight)
    _train(model, own, plain, reference, 0, 1)
    _state(plain, reference[0], model, own[0])
    _train(model, own, plain, reference, 2)


def test_a_step_takes_two_exchanges_and_says_their_bytes() -> None:
    model, plain = pair(3)
    own, reference = _shard(model, LeftAndRight), _plain(plain, LeftAndRight)
    _train(model, own, plain, reference, 0)
    model.wire_log.clear()
    _train(model, own, plain, reference, 1)
    sent = [event for event in model.wire_log if event.operation == "all_to_all"]
    rows = sum(p.to_local().nbytes for p in _matrices(model))
    same("exchanges", len(sent), 2)
    same("bytes to the owners: rows of gradients and weights", sent[0].payload_bytes, 2 * rows)
    both = torch.tensor([sent[1].payload_bytes])
    dist.all_reduce(both)
    same("bytes from the owners", both.item(), sum(p.nbytes for p in _matrices(plain)))


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Also into an optimizer that has not stepped, and from one that shows shards."""
    for number, make in enumerate((LeftAndRight, partial(_OPTIM.Adafactor, lr=0.05))):
        model, plain = pair(3)
        own, reference = _shard(model, make), _plain(plain, make)
        _train(model, own, plain, reference, 0, 1)
        path = tmp_path / str(number)
        mfsdp_core.save_checkpoint(path, model, own[0])
        fresh, _ = pair(2)
        resumed = _shard(fresh, make)
        mfsdp_core.load_checkpoint(path, fresh, resumed[0])
        resumed[1].load_state_dict(own[1].state_dict())
        _train(fresh, resumed, plain, reference, 2)


def test_state_counts_in_the_ledger_of_the_rank_that_has_it() -> None:
    model, plain = pair(3)
    own, reference = _shard(model, LeftAndRight), _plain(plain, LeftAndRight)
    _train(model, own, plain, reference, 0)
    held = torch.tensor([model.ledger.bytes_by_category()["optimizer_state"]])
    dist.all_reduce(held)
    states = [*reference[0].state.values(), *reference[1].state.values()]
    elements = [v for state in states for v in state.values() if isinstance(v, Tensor) and v.ndim]
    whole = sum(value.nbytes for value in elements)
    assert whole <= held.item() < 1.1 * whole


@pytest.mark.on_ranks(4)
def test_matrices_that_tensor_parallelism_cuts_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = Small()
    for unit in plain.units:
        unit.up.weight = nn.Parameter(distribute_tensor(unit.up.weight, mesh["tp"], [Shard(0)]))
    model = mfsdp_core.fully_shard_model(
        plain, fsdp_unit_modules=[Unit], device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp"
    )
    optimizer = LeftAndRight(_matrices(model))
    refuses(
        ConfigurationError,
        "is cut by tensor parallelism",
        lambda: mfsdp_core.fully_shard_optimizer(optimizer, whole_matrices=True),
    )
