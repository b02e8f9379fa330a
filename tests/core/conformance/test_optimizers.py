"""Optimizers over shards step as torch's do over whole tensors, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    WIDTH,
    Unit,
    batch,
    compare_gradients,
    compare_weights,
    counted_pieces,
    name_of,
    pair,
    plain_backward,
    reread,
    train_beside,
)
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    ConfigurationError,
    LifecycleError,
    StateDictError,
)
from mfsdp_core.state.optimizer import refuse_loss_scale

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_OPTIM = torch.optim
Make = Callable[[Any], torch.optim.Optimizer]

#: Of torch's elementwise ones, with what makes their state odd.
_ELEMENTWISE: tuple[Make, ...] = (
    partial(_OPTIM.SGD, lr=0.1),
    partial(_OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(_OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    partial(_OPTIM.AdamW, lr=0.1, amsgrad=True),
    partial(_OPTIM.Adam, lr=0.1, foreach=True),
    partial(_OPTIM.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    partial(_OPTIM.ASGD, lr=0.1),
    partial(_OPTIM.NAdam, lr=0.1),
    partial(_OPTIM.RMSprop, lr=0.1, momentum=0.9, centered=True),
    partial(_OPTIM.Rprop, lr=0.1),
    partial(_OPTIM.Adadelta, lr=0.1),
    partial(_OPTIM.Adamax, lr=0.1),
    partial(_OPTIM.RAdam, lr=0.1),
    partial(_OPTIM.AdamW, lr=0.1, fused=True),
)


def _both(make: Make, strategy: int = 3) -> tuple[Any, Any, Any, Any]:
    """Model, its optimizer, and those of plain torch."""
    model, plain = pair(strategy)
    optimizer = mfsdp_core.fully_shard_optimizer(make(model.parameters()))
    return model, optimizer, plain, make(plain.parameters())


@pytest.mark.parametrize("way", ["shard by shard", "piece by piece", "over DTensors"])
def test_elementwise_optimizers_step_as_torchs_do(way: str) -> None:
    """And state is a DTensor again. A hook may look at parameters, so the step keeps DTensors."""
    with counted_pieces(4 if way == "piece by piece" else None) as pieces:
        for number, make in enumerate(_ELEMENTWISE):
            model, optimizer, *reference = _both(make, strategy=number % 4)
            if way == "over DTensors":
                optimizer.register_step_pre_hook(lambda *_: None)
            if way == "over DTensors" and isinstance(optimizer, _OPTIM.Rprop):
                # Writes where a mask says; local tensors can, and a shard refuses it.
                train = partial(train_beside, model, optimizer, *reference)
                refuses(LifecycleError, "index_put_", train, 0)
                continue
            train_beside(model, optimizer, *reference, 0, 1, 2)
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    is_shard = isinstance(value, DTensor)
                    if isinstance(value, Tensor) and value.ndim:
                        same(name, is_shard and value.placements, parameter.placements)
    same("in pieces", max(pieces, default=0) > 1, way == "piece by piece")


def test_an_optimizer_that_was_built_before_is_taken_over() -> None:
    """With its groups, options and what it made when it was built."""
    for make in _ELEMENTWISE[3], _ELEMENTWISE[5]:
        _, plain = pair(3)
        module = copy.deepcopy(plain)

        def groups(of: Any) -> list[dict[str, Any]]:
            units = list(of.units.parameters())
            return [{"params": units, "lr": 0.01}, {"params": [of.scale]}]

        model, optimizer = mfsdp_core.fully_shard(
            module,
            make(groups(module)),
            fsdp_unit_modules=[Unit],
            mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(None),
        )
        same("rates", [g["lr"] for g in optimizer.param_groups], [0.01, 0.1])
        same("again", mfsdp_core.fully_shard_optimizer(optimizer) is optimizer, True)
        reference = make(groups(plain))
        schedules = [_OPTIM.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference)]
        for step in range(2):
            train_beside(model, optimizer, plain, reference, step)
            for schedule in schedules:
                schedule.step()


def test_steps_may_be_taken_apart() -> None:
    """Without finishing gradients, and without refreshing weights, where the caller says so."""
    for strategy in (1, 3):
        model, optimizer, plain, reference = _both(_ELEMENTWISE[3], strategy)
        with model.no_sync():
            model(batch(0)).backward()
        model.finish_grad_sync()
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
        model.install_optimized_model_weights()
        optimizer.zero_grad()
        plain_backward(plain, 0)
        reference.step()
        reference.zero_grad()
        compare_weights(model, plain)
        with model.no_sync():
            model(batch(1)).backward()
        plain_backward(plain, 1)
        optimizer.step()
        reference.step()
        compare_weights(model, plain)
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None for p in model.parameters()), "zeros were wanted"
        model(batch(2)).backward()
        reference.zero_grad()
        plain_backward(plain, 2)
        compare_gradients(model, plain)
        with model.no_sync():
            optimizer.zero_grad(zero_grad_buffer=False)
        assert all(p.grad is None for p in model.parameters()), "gradients were to go"


class _Twice(torch.optim.Optimizer):
    """Asks for the loss before and after half of a step, and scales by the joint norm."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        losses = []
        for _ in range(2):
            if closure is not None:
                losses.append(float(closure().detach()))
            for group in self.param_groups:
                for p in group["params"]:
                    norm = p.grad.square().sum().sqrt()
                    p.add_(p.grad / (1 + norm), alpha=-group["lr"])
        return losses


class _Gathering(_Twice):
    """Looks at whole matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.mean(-1) if p.ndim > 1 else p.grad
                p.grad.div_(1 + rows.abs().max())
        return super().step(closure)


def test_compute_weights_follow_a_step_at_once() -> None:
    """Of a whole copy in another dtype, unless the caller says otherwise; then when asked."""
    policy = mfsdp_core.MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    for wanted in (True, False):
        model, _ = pair(0, dtype=torch.bfloat16, mixed_precision_policy=policy)
        optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        compute = {p.names[0]: p.raw for b in model._buckets() for p in b.parameters}
        before = {n: p.detach().clone() for n, p in compute.items()}
        model(batch(dtype=torch.bfloat16)).backward()
        optimizer.step(install_optimized_model_weights=wanted)
        if not wanted:
            same("as before", {n: p.detach() for n, p in compute.items()}, before)
            model.install_optimized_model_weights()
        for name, p in model.named_parameters():
            now = p.detach().to_local().to(torch.bfloat16)
            same(name, compute[name_of(name)].detach(), now)


def test_closures_are_evaluated_with_the_weights_of_now() -> None:
    """Once before an elementwise step, as often as others like, and the loss comes back."""
    for make, strategy in ((_ELEMENTWISE[1], 3), (_Twice, 3), (_Twice, 1)):
        model, optimizer, plain, reference = _both(make, strategy)

        def closure(m: Any = model, o: Any = optimizer) -> Tensor:
            o.zero_grad()
            loss: Tensor = m(batch(0))
            loss.backward()
            return loss

        @torch.enable_grad()
        def plain_closure(p: Any = plain) -> Tensor:
            p.zero_grad()
            plain_backward(p, 0)
            loss: Tensor = p(batch(0))
            return loss

        for _ in range(2):
            found, wanted = optimizer.step(closure), reference.step(plain_closure)
            found = torch.as_tensor(found, dtype=torch.float64).detach()
            close("loss", found, torch.as_tensor(wanted, dtype=torch.float64).detach(), 1e-9)
            compare_weights(model, plain, 1e-9)


def test_what_neither_shards_nor_whole_tensors_serve_is_refused() -> None:
    """Torch's by name; those of others get whole tensors to read."""
    model, plain = pair(3)
    whole, _ = pair(0)
    wrap = mfsdp_core.fully_shard_optimizer
    for one in (model, whole):
        refuses(
            ConfigurationError, "Use Adam", lambda m=one: wrap(_OPTIM.SparseAdam(m.parameters()))
        )
        refuses(
            ConfigurationError, "inner products", lambda m=one: wrap(_OPTIM.LBFGS(m.parameters()))
        )
    refuses(
        ConfigurationError,
        "none of its parameters is",
        lambda: wrap(_OPTIM.SGD(plain.parameters(), lr=0.1)),
    )
    module = copy.deepcopy(plain)
    other = _OPTIM.SGD([*module.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    shard = partial(mfsdp_core.fully_shard, fsdp_unit_modules=[Unit])
    refuses(ConfigurationError, "1 parameters of the optimizer", lambda: shard(module, other))
    stepped = _OPTIM.AdamW(module.parameters())
    plain_backward(module, 0)
    stepped.step()
    refuses(ConfigurationError, "has not stepped", lambda: shard(module, stepped))
    refuses(
        ConfigurationError,
        "inner products",
        lambda: shard(module, _OPTIM.LBFGS(module.parameters())),
    )
    train_beside(*_both(_Gathering, 0), 0, 1)
    words = "Compute other values with gather_full(tensor)"
    refuses(LifecycleError, words, lambda: train_beside(*_both(_Gathering, 3), 0, 1))


def test_states_are_there_before_the_first_step() -> None:
    """As the first step would begin with them; what nobody knows is not made up."""
    for number in (0, 1, 3, 5, 6, 9, 13):
        make = _ELEMENTWISE[number]
        model, optimizer, plain, reference = _both(make)
        state = optimizer.state_dict()
        if make is not _ELEMENTWISE[0]:
            same("entries", len(state["state"]), len(list(model.parameters())))
        fresh = mfsdp_core.fully_shard_optimizer(make(model.parameters()))
        fresh.load_state_dict(reread(state))
        # torch casts the numbers of some to the dtype of the weights when it loads them.
        train_beside(model, fresh, plain, reference, 0, 1, relative=1e-6)
    for make in (_ELEMENTWISE[2], _Momentum):
        model, optimizer, plain, reference = _both(make)
        state = optimizer.state_dict()
        same("nothing", reread(state)["state"], {})
        refuses(StateDictError, "before", optimizer.load_state_dict, state)
        train_beside(model, optimizer, plain, reference, 0)
        kept = copy.deepcopy(optimizer.state_dict())
        train_beside(model, optimizer, plain, reference, 1)
        optimizer.load_state_dict(kept)
    model, optimizer, plain, reference = _both(partial(_OPTIM.AdamW, lr=0.0))
    optimizer.step()
    same("made by a step of nothing", len(optimizer.state), len(list(model.parameters())))
    compare_weights(model, plain)
    bytes_ = model.ledger.bytes_by_category()["optimizer_state"]
    local = sum(p.detach().to_local().numel() for p in model.parameters())
    same("bytes", bytes_, 2 * 8 * local + 4 * len(list(model.parameters())))


class _Momentum(torch.optim.Optimizer):
    """Of somebody else, with state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.add_(state["sum"], alpha=-0.1)


def test_states_of_an_unsharded_run_are_cut() -> None:
    """Whole tensors to rows, shards as they are; anything else is refused."""
    for number, strategy in ((3, 0), (3, 3), (1, 3), (5, 3)):
        make = _ELEMENTWISE[number]
        model, optimizer, plain, reference = _both(make, strategy)
        train_beside(model, optimizer, plain, reference, 0, 1)
        fresh = mfsdp_core.fully_shard_optimizer(make(model.parameters()))
        fresh.load_state_dict(copy.deepcopy(reference.state_dict()))
        train_beside(model, fresh, plain, reference, 2)
        again = mfsdp_core.fully_shard_optimizer(make(model.parameters()))
        again.load_state_dict(reread(fresh.state_dict()))
        train_beside(model, again, plain, reference, 3)
    model, optimizer, plain, reference = _both(_ELEMENTWISE[3])
    train_beside(model, optimizer, plain, reference, 0)

    def changed(value: Any) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(reference.state_dict())
        state["state"][1]["exp_avg"] = value
        return state

    own = optimizer.state_dict()["state"]
    for words, value in (
        ("a tensor of shape (3,)", torch.ones(3)),
        ("a shard of shape", own[2]["exp_avg"]),
        ("exp_avg of parameter 1", torch.ones(7, WIDTH + 1)),
    ):
        state = changed(value)
        refuses(StateDictError, words, optimizer.load_state_dict, state)
    train_beside(model, optimizer, plain, reference, 1)


def _halves(of: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of units, and the others."""
    named = list(of.named_parameters())
    return [p for n, p in named if "units" in n], [p for n, p in named if "units" not in n]


def test_optimizers_of_one_model_leave_each_other_alone() -> None:
    """Clearing one does not clear what the other has yet to step with."""
    model, plain = pair(2)

    def two(of: Any) -> list[torch.optim.Optimizer]:
        inner, rest = _halves(of)
        return [_OPTIM.AdamW(inner, lr=0.1), _OPTIM.SGD(rest, lr=0.1)]

    own = [mfsdp_core.fully_shard_optimizer(o) for o in two(model)]
    theirs = two(plain)
    for step in range(3):
        model(batch(step)).backward()
        plain_backward(plain, step)
        for mine, reference in zip(own, theirs, strict=True):
            mine.step()
            mine.zero_grad()
            reference.step()
            reference.zero_grad()
        compare_weights(model, plain)
        assert not model.backward_seen, "the last one begins a new cycle"
    model(batch(3)).backward()
    for mine in own:
        mine.step()
    own[0].zero_grad()
    assert not model.backward_seen, "nobody has yet to step: a new cycle begins"
    model(batch(4)).backward()


def _to_zeros(_model: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)


def _by_hand(model: Any, _optimizers: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def test_gradients_may_be_cleared_in_any_way() -> None:
    """By hand, to zeros, and that before the other optimizer has stepped; cleared ones stay so."""
    for strategy, (clear, interleaved) in product(
        (0, 1, 3), ((_by_hand, False), (_to_zeros, False), (_to_zeros, True))
    ):
        model, plain = pair(strategy)
        make = partial(_OPTIM.SGD, lr=0.1, momentum=0.9)
        sides = [(of, [make(some) for some in _halves(of)]) for of in (model, plain)]
        for optimizer in sides[0][1]:
            mfsdp_core.fully_shard_optimizer(optimizer)
        for number in range(3):
            model(batch(number)).backward()
            plain_backward(plain, number)
            for of, optimizers in sides:
                for group in [[one] for one in optimizers] if interleaved else [optimizers]:
                    for optimizer in group:
                        optimizer.step()
                    clear(of, group)
        for _, optimizers in sides:
            for optimizer in optimizers:
                optimizer.step()
        compare_weights(model, plain)


def test_norms_are_those_of_the_whole_gradient() -> None:
    """Of the model, of some parameters, without a bound, without gradients."""
    clip = mfsdp_core.clip_grad_norm_
    for strategy in (0, 3):
        model, plain = pair(strategy, sync_model_each_microbatch=False)
        same("of nothing", float(clip(model, 1.0)), 0.0)
        for of_whole in (True, False):  # finishes a gradient that nobody has marked as the last
            model.zero_grad()
            plain.zero_grad()
            for number in range(2):
                model(batch(number)).backward()
            plain_backward(plain, 0, 1)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            close("norm", clip(model if of_whole else list(model.parameters()), 0.01), wanted)
            compare_gradients(model, plain)
        for bound in (float("inf"), 1e9, 0.01):
            model.zero_grad()
            plain.zero_grad()
            model(batch(0)).backward()
            plain_backward(plain, 0)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), bound)
            close("norm", clip(model, bound), wanted)
            compare_gradients(model, plain)
        some = [p for n, p in model.named_parameters() if "up" in n]
        named = dict(plain.named_parameters())
        others = [named[name_of(n)] for n, _ in model.named_parameters() if "up" in n]
        close("of some", clip(iter(some), 1e-4), nn.utils.clip_grad_norm_(others, 1e-4))
        compare_gradients(model, plain)
    on_meta = nn.Parameter(torch.ones(2, device="meta"))
    same("where the parameters are", clip([on_meta], 1.0).device, on_meta.device)
    whole = mfsdp_core.MixedPrecisionPolicy(None)
    for strategy in (0, 3):
        model, _ = pair(strategy, dtype=torch.bfloat16, mixed_precision_policy=whole)
        model(batch(dtype=torch.bfloat16)).backward()
        found = [mfsdp_core.gather_full(p.grad).double() for p in model.parameters()]
        wanted = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        close("of BF16 gradients", clip(model, float("inf")), wanted, 1e-5)


def test_cycles_without_zero_grad_add_up_under_either_name() -> None:
    """What the user has removed between two of them begins anew, and nothing else."""
    for attribute in ("grad", "decoupled_grad"):
        for strategy in (2, 3):
            model, plain = pair(strategy, use_decoupled_grad=attribute != "grad")
            for number in range(3):
                model(batch(number)).backward()
                plain_backward(plain, number)
                compare_gradients(model, plain, attribute=attribute)
                if number == 1:
                    setattr(model.module.units[0].up.weight, attribute, None)
                    plain.units[0].up.weight.grad = None


def test_steps_without_gradients_are_those_of_torch() -> None:
    """They do nothing in a new cycle, and are refused behind a forward pass that nobody used."""
    model, plain = pair(3)
    optimizer = mfsdp_core.fully_shard_optimizer(_OPTIM.SGD(model.parameters(), lr=0.1))
    model(batch())
    same("waits", model.awaits_backward, True)
    refuses(LifecycleError, "found no gradient at all", optimizer.step)
    optimizer.zero_grad()
    same("a new cycle", model.awaits_backward, False)
    optimizer.step()
    compare_weights(model, plain)


class _TakesScaler(_OPTIM.SGD):
    """With a loss scale in both forms that torch has had."""

    grad_scale = None

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        del grad_scaler
        return super().step(closure)


def test_scales_that_would_be_lost_are_refused() -> None:
    """Only of optimizers that are capturable."""
    optimizer: Any = _TakesScaler([torch.zeros(1, requires_grad=True)], lr=0.1)
    refuse_loss_scale(optimizer)
    optimizer.capturable = True
    refuses(CapabilityNotBuiltError, "GradScaler", lambda: refuse_loss_scale(optimizer))
