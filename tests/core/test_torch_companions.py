"""What users of torch put beside an optimizer: schedulers, closures, scalers, averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mfsdp_core
from mfsdp_core.errors import ConfigurationError, LifecycleError
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import RankPool, mesh, two_axes
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
        torch.distributed.all_reduce(own, group=mesh(RANKS).get_group("dp"))
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


@pytest.mark.parametrize(
    ("strategy", "hooked"), [(name, index % 2 == 1) for index, name in enumerate(STRATEGIES)]
)
def test_a_step_takes_a_closure(ranks: RankPool, strategy: str, hooked: bool) -> None:
    for auto_sync in (True, False):
        for error, losses in ranks.run(with_closure, strategy, hooked, auto_sync):
            assert error < 1e-12
            assert all(ours == pytest.approx(theirs) for ours, theirs in losses)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_closure_sees_the_weights_that_its_optimizer_has_moved(
    ranks: RankPool, strategy: str
) -> None:
    assert max(ranks.run(with_an_evaluation_inside_the_step, strategy)) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "fused"), [(name, index % 2 == 1) for index, name in enumerate(STRATEGIES)]
)
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


class Rows(torch.optim.Optimizer):
    """An optimizer that nobody here knows. `rule` makes the update of one matrix."""

    def __init__(self, parameters: Any, rule: str) -> None:
        super().__init__(parameters, {"rule": rule})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(RULES[group["rule"]](p, p.grad), alpha=0.1)


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "trust ratio": lambda p, g: g * (p.norm() / (g.norm() + 1e-3)),
    "products of rows": lambda _, g: g @ g.t() @ g,
    "mean of columns": lambda _, g: g - g.mean(dim=0, keepdim=True),
    "sum of columns": lambda _, g: g / (g.square().sum(dim=0, keepdim=True) + 1),
}


def two_matrices() -> nn.Module:
    """Two matrices of which ranks have unequal numbers of rows."""
    return nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(7, 3, bias=False))


def with_a_rule(rule: str) -> float | str:
    """Error of the weights against plain torch, or what is said."""
    torch.manual_seed(2)
    module, plain_module = two_matrices(), two_matrices()
    plain_module.load_state_dict(module.state_dict())
    model, optimizer = mfsdp_core.fully_shard(
        module, Rows(module.parameters(), rule), device_mesh=mesh(4), dp_shard_dim="dp"
    )
    reference = Rows(plain_module.parameters(), rule)
    value = torch.randn(3, 4)
    try:
        for _ in range(2):
            for one, chosen in ((model, optimizer), (plain_module, reference)):
                chosen.zero_grad()
                one(value).square().mean().backward()
                chosen.step()
    except ConfigurationError as error:
        return str(error)
    found = {n: mfsdp_core.gather_full(p.detach()) for n, p in model.module.named_parameters()}
    return relative_difference(found, parameters_of(plain_module))


def test_an_unknown_optimizer_is_right_or_refused_by_name(ranks: RankPool) -> None:
    for found in ranks.run(with_a_rule, "trust ratio"):
        assert found < 1e-5
    for rule in ("products of rows", "mean of columns", "sum of columns"):
        for found in ranks.run(with_a_rule, rule):
            assert (
                "Rows looks at whole matrices" in found if isinstance(found, str) else found < 1e-5
            )


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


class WithBuffers(nn.Module):
    """Units with running statistics, a tied weight, and a weight that is read past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in "ab")
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.linear(x, self.first.weight)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def averaged_weights(strategy: str, ema: bool) -> tuple[float, list[str]]:
    """EMA or SWA of a sharded module beside that of the same module in plain torch."""
    averaging: dict[str, Any] = {"use_buffers": True}
    if ema:
        # torch's own averages in one go cannot mix shards with buffers.
        averaging = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)}
    torch.manual_seed(11)
    module = WithBuffers()
    plain_module = WithBuffers()
    plain_module.load_state_dict(module.state_dict())
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    where: dict[str, Any] = {"device_mesh": mesh(4), "dp_shard_dim": "dp"}
    if strategy == "hybrid":
        axes, group = two_axes()
        where = {"device_mesh": axes, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        where |= {"hybrid_fsdp_group": group, "outer_dp_sharding_strategy": "optim"}
    model, optimizer = mfsdp_core.fully_shard(
        module,
        make(module),
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy="optim_grads_params" if strategy == "hybrid" else strategy,
        **where,
    )
    reference = make(plain_module)
    average = torch.optim.swa_utils.AveragedModel(model.module, **averaging)
    plain_average = torch.optim.swa_utils.AveragedModel(plain_module, **averaging)
    values = torch.randn(3, 4, 5)
    for value in values:
        for one, chosen in ((model, optimizer), (plain_module, reference)):
            chosen.zero_grad()
            one(value).square().mean().backward()
            chosen.step()
        average.update_parameters(model.module)
        plain_average.update_parameters(plain_module)
    said = []
    try:
        average(values[0])
    except LifecycleError as error:
        said.append(str(error))
    with torch.no_grad():
        average.eval()
        before, plain_before = average(values[0]), plain_average.eval()(values[0])
        torch.optim.swa_utils.update_bn(values, average)
        torch.optim.swa_utils.update_bn(values, plain_average)
        after, plain_after = average(values[1]), plain_average(values[1])
        again = torch.optim.swa_utils.AveragedModel(average.module)
        assert torch.equal(again(values[1]), average(values[1]))
        differs = not torch.allclose(model.eval()(values[1]), after)
    for refused in (lambda: torch.optim.swa_utils.AveragedModel(model),):
        try:
            refused()
        except LifecycleError as error:
            said.append(str(error))
    found = {"before": before, "after": after}
    # The model goes on where it was: its own weights were not touched.
    wanted = {"before": plain_before, "after": plain_after}
    optimizer.zero_grad()
    model.train()(values[0]).square().mean().backward()
    assert differs
    return relative_difference(found, wanted), said


@pytest.mark.parametrize(
    ("strategy", "ema"),
    [(name, index % 2 == 1) for index, name in enumerate((*STRATEGIES, "hybrid"))],
)
def test_averaged_weights_are_those_of_plain_torch(
    ranks: RankPool, strategy: str, ema: bool
) -> None:
    for error, said in ranks.run(averaged_weights, strategy, ema):
        assert error < 1e-5
        assert "no_grad" in said[0]
        assert "AveragedModel(model.module)" in said[1]
