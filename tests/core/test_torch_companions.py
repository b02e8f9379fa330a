"""What users of torch put beside an optimizer: scalers and averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_core
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import beside, near, own_batch
from oracle.models import TOYS, Chain, batch, build, loss
from oracle.ranks import mesh, on_two_axes
from oracle.reference import compare
from oracle.sharded import STRATEGIES, Sharded

pytestmark = pytest.mark.on_ranks

NAME, RANKS, STEPS = "linear_stack", 2, 4


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


@pytest.mark.parametrize(
    ("strategy", "fused"), [(name, index % 2 == 1) for index, name in enumerate(STRATEGIES)]
)
def test_a_gradient_scaler_skips_on_all_ranks_what_overflows_on_one(
    strategy: str, fused: bool
) -> None:
    """In step 1."""
    make = lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused)  # noqa: E731
    toy, optimizer = sharded(strategy, make)
    model, mean_loss = plain()
    reference = make(model.parameters())
    scaler, reference_scaler = (
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)
    )
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
        assert scaler.get_scale() == reference_scaler.get_scale(), step
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    compare(toy.full_parameters(), wanted)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_under_autocast_are_those_of_plain_torch(strategy: str) -> None:
    """Two microbatches, so that casts that autocast keeps do not outlive their weights."""
    pair = beside(Chain, (strategy, "storage_resize"), dtype=torch.float32)
    for module in pair.both:
        for number in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = loss(module(own_batch(number).float()))
            with pair.model.sync() if number else pair.model.no_sync():
                value.backward()
    pair.compare_gradients(1e-5)


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


@pytest.mark.parametrize(
    ("strategy", "ema"),
    [(name, index % 2 == 1) for index, name in enumerate((*STRATEGIES, "hybrid"))],
)
def test_averaged_weights_are_those_of_plain_torch(strategy: str, ema: bool) -> None:
    """EMA or SWA of the module inside."""
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
        where = on_two_axes("optim")
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
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LifecycleError, match="does not compute"):
        average(values[0])
    again = torch.optim.swa_utils.AveragedModel(average.module)
    # The names of an average are those of the wrapper; it also counts what it has averaged.
    model.load_state_dict(again.state_dict(), strict=False)
    with torch.no_grad():
        near("before", model.eval()(values[0]), plain_average.eval()(values[0]), 1e-5)
        torch.optim.swa_utils.update_bn(values, model)
        torch.optim.swa_utils.update_bn(values, plain_average)
        near("after", model(values[1]), plain_average(values[1]), 1e-5)
    model.load_state_dict(own)
    with pytest.raises(LifecycleError, match=r"AveragedModel\(model\.module\)"):
        torch.optim.swa_utils.AveragedModel(model)
    # The model goes on where it was: its own weights were not touched.
    optimizer.zero_grad()
    model.train()(values[0]).square().mean().backward()
