"""What users of torch put beside an optimizer: schedulers, closures, scalers, averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mfsdp_core
from mfsdp_core.errors import ConfigurationError
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import RankPool, mesh
from oracle.reference import Named, relative_difference
from oracle.sharded import STRATEGIES, Sharded

pytestmark = pytest.mark.processes

NAME, RANKS, STEPS = "linear_stack", 2, 4
Schedule = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=2 * STEPS),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sharded(
    strategy: str, make_optimizer: Callable[[Any], torch.optim.Optimizer], **arguments: Any
) -> tuple[Sharded, Any]:
    """The toy model through `fully_shard`, as a user's training script has it."""
    module = build(NAME, torch.float64)
    model, optimizer = mfsdp_core.fully_shard(
        module,
        make_optimizer(module.parameters()),
        device_mesh=mesh(RANKS),
        dp_shard_dim="dp",
        fsdp_unit_modules=list(TOYS[NAME].units),
        zero_dp_strategy=strategy,
        mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments,
    )
    return Sharded(NAME, RANKS, torch.float64, model), optimizer


def plain() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """The same model in one process, and its loss over the batches of all ranks."""
    model = build(NAME, torch.float64)

    def mean_loss(cycle: int) -> torch.Tensor:
        values = [loss(model(batch(NAME, r, 0, torch.float64, cycle))) for r in range(RANKS)]
        return sum(values, torch.zeros((), dtype=torch.float64)) / RANKS

    return model, mean_loss


def parameters_of(model: nn.Module) -> Named:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_schedule(schedule: str) -> tuple[float, list[list[float]]]:
    """Error of the weights, and the learning rates of both sides, step by step."""
    toy, optimizer = sharded("optim_grads_params", adamw)
    scheduler = SCHEDULES[schedule](optimizer)
    model, mean_loss = plain()
    reference = adamw(model.parameters())
    reference_scheduler = SCHEDULES[schedule](reference)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        toy.backward(cycle=step)
        optimizer.step()
        scheduler.step()
        reference.zero_grad()
        mean_loss(step).backward()
        reference.step()
        reference_scheduler.step()
        rates.append([o.param_groups[0]["lr"] for o in (optimizer, reference)])
    return relative_difference(toy.full_parameters(), parameters_of(model)), rates


def with_closure(strategy: str, hooked: bool, auto_sync: bool) -> tuple[float, list[list[float]]]:
    """Steps that are given a closure, as Lightning's automatic optimization does."""
    toy, optimizer = sharded(strategy, adamw, sync_model_each_microbatch=auto_sync)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    model, mean_loss = plain()
    reference = adamw(model.parameters())
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = toy.forward(cycle=step)
            value.backward()
            return value

        def reference_closure(step: int = step) -> torch.Tensor:
            reference.zero_grad()
            value = mean_loss(step)
            value.backward()
            return value

        own = optimizer.step(closure).detach()
        torch.distributed.all_reduce(own, group=mesh(RANKS)["dp"].get_group())
        theirs = reference.step(reference_closure).detach()
        losses.append([float(own) / RANKS, float(theirs)])
    return relative_difference(toy.full_parameters(), parameters_of(model)), losses


class LookAround(torch.optim.SGD):
    """Steps along the gradient found a little ahead: evaluates in the middle of its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        ahead = [0.1 * p.grad for p in parameters]
        torch._foreach_sub_(parameters, ahead)
        with torch.enable_grad():
            value = closure()
        torch._foreach_add_(parameters, ahead)
        super().step()
        return value


def with_an_evaluation_inside_the_step(strategy: str) -> float:
    """A look-ahead optimizer, whose closure must see the weights that it has just moved."""
    make = lambda parameters: LookAround(parameters, lr=0.05)  # noqa: E731
    toy, optimizer = sharded(strategy, make)
    model, mean_loss = plain()
    reference = make(model.parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = toy.forward(cycle=step)
            value.backward()
            return value

        def reference_closure(step: int = step) -> torch.Tensor:
            reference.zero_grad()
            value = mean_loss(step)
            value.backward()
            return value

        closure()
        optimizer.step(closure)
        reference_closure()
        reference.step(reference_closure)
    return relative_difference(toy.full_parameters(), parameters_of(model))


def with_scaler(strategy: str, fused: bool) -> tuple[float, list[list[float]]]:
    """A GradScaler; in step 1 a single rank overflows, so that all of them must skip the step."""
    make = lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused)  # noqa: E731
    toy, optimizer = sharded(strategy, make)
    model, mean_loss = plain()
    reference = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    reference_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        overflow = float("inf") if step == 1 else 1.0
        mine = overflow if mesh(RANKS).get_local_rank("dp") == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(toy.forward(cycle=step) * mine).backward()
        scaler.unscale_(optimizer)
        mfsdp_core.clip_grad_norm_(toy.model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        reference_scaler.scale(mean_loss(step) * overflow).backward()
        reference_scaler.unscale_(reference)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference_scaler.step(reference)
        reference_scaler.update()
        scales.append([scaler.get_scale(), reference_scaler.get_scale()])
    return relative_difference(toy.full_parameters(), parameters_of(model)), scales


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduler_made_after_fully_shard_drives_the_optimizer(
    ranks: RankPool, schedule: str
) -> None:
    for error, rates in ranks.run(with_schedule, schedule):
        assert error < 1e-12
        assert all(ours == pytest.approx(theirs) for ours, theirs in rates)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_takes_a_closure(ranks: RankPool, strategy: str, hooked: bool) -> None:
    for auto_sync in (True, False):
        for error, losses in ranks.run(with_closure, strategy, hooked, auto_sync):
            assert error < 1e-12
            assert all(ours == pytest.approx(theirs) for ours, theirs in losses)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_closure_sees_the_weights_that_its_optimizer_has_moved(
    ranks: RankPool, strategy: str
) -> None:
    assert max(ranks.run(with_an_evaluation_inside_the_step, strategy)) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_on_all_ranks_what_overflows_on_one(
    ranks: RankPool, strategy: str, fused: bool
) -> None:
    for error, scales in ranks.run(with_scaler, strategy, fused):
        assert error < 1e-12
        assert all(ours == theirs for ours, theirs in scales)


def refusal(name: str, strategy: int) -> str:
    """What `fully_shard` says; the module must be as it was."""
    module = nn.Linear(4, 4, bias=False)
    optimizer = getattr(torch.optim, name)(module.parameters())
    before = type(module.weight.data)
    try:
        mfsdp_core.fully_shard(
            module, optimizer, device_mesh=mesh(2), dp_shard_dim="dp", zero_dp_strategy=strategy
        )
    except ConfigurationError as error:
        assert type(module.weight.data) is before
        assert optimizer.param_groups[0]["params"][0] is module.weight
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_an_optimizer_that_needs_whole_matrices_is_refused_by_name(
    ranks: RankPool, name: str
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    for strategy in (1, 2, 3):
        assert all(name in said for said in ranks.run(refusal, name, strategy))
    whole = ranks.run(refusal, name, 0)
    assert all(bool(said) == (name in {"LBFGS", "SparseAdam"}) for said in whole)


def matrices_under_no_shard(name: str) -> float:
    """Where every rank has whole tensors, such an optimizer does what it does in plain torch."""
    torch.manual_seed(3)
    module = nn.Linear(300, 300, bias=False)
    plain_module = nn.Linear(300, 300, bias=False)
    plain_module.load_state_dict(module.state_dict())
    make = lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.1)  # noqa: E731
    model, optimizer = mfsdp_core.fully_shard(
        module, make(module), device_mesh=mesh(2), dp_shard_dim="dp", zero_dp_strategy=0
    )
    reference = make(plain_module)
    value = torch.randn(3, 300)
    for _ in range(3):
        for one, chosen in ((model, optimizer), (plain_module, reference)):
            chosen.zero_grad()
            one(value).square().mean().backward()
            chosen.step()
    found = {"weight": mfsdp_core.gather_full(model.module.weight.detach())}
    return relative_difference(found, {"weight": plain_module.weight.detach()})


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_of_whole_matrices_works_where_ranks_have_them(
    ranks: RankPool, name: str
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    assert max(ranks.run(matrices_under_no_shard, name)) < 1e-6
