"""What users of torch put beside an optimizer: scalers, averaged weights, clipping."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_core
from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import beside, near, own_batch
from oracle.models import Chain, loss
from oracle.ranks import mesh, on_two_axes
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


@pytest.mark.parametrize(
    ("strategy", "fused"), [("no_shard", False), ("optim", True), ("optim_grads_params", False)]
)
def test_a_gradient_scaler_skips_on_all_ranks_what_overflows_on_one(
    strategy: str, fused: bool
) -> None:
    """In step 1."""
    pair = beside(Chain, (strategy, "storage_resize"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in pair.both]
    mfsdp_core.fully_shard_optimizer(optimizers[1])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    is_second = mesh(2).get_local_rank("dp") == 1
    for step in range(4):
        overflow = float("inf") if step == 1 and is_second else 1.0
        for module, optimizer, scaler in zip(pair.both, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss(module(own_batch(step))) * overflow).backward()
        pair.average()
        for module, optimizer, scaler in zip(pair.both, optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            if module is pair.model:
                mfsdp_core.clip_grad_norm_(module, 0.5)
            else:
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
    pair.compare_weights()


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


@pytest.mark.parametrize("scope", ["", "no_sync"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_step_that_finishes_gradients_after_somebody_may_have_clipped_them_warns_once(
    strategy: str, scope: str
) -> None:
    """torch.nn.utils.clip_grad_norm_ finds no gradient before the reductions are finished."""
    pair = beside(Chain, (strategy, "storage_resize"), sync_model_each_microbatch=False)
    optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.SGD(pair.model.parameters(), lr=1.0))
    left_open = ExitStack()

    def unsynced() -> list[str]:
        with warnings.catch_warnings(record=True) as caught, left_open:
            warnings.simplefilter("always")
            loss(pair.model(own_batch(0))).backward()
            assert nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-6) == 0
            optimizer.step()
            optimizer.zero_grad()
        return [str(one.message) for one in caught if "clip_grad_norm_" in str(one.message)]

    with pair.model.sync():
        loss(pair.model(own_batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    if scope:
        left_open.enter_context(pair.model.no_sync())
    (said,) = unsynced()
    assert "the last microbatch was not synced" in said
    assert ("no_sync() of the model is still open" in said) == bool(scope)
    assert unsynced() == []


def test_main_weights_that_hold_less_than_the_model_are_said() -> None:
    with pytest.warns(RuntimeWarning, match=r"torch\.float32 round weights in torch\.float64"):
        beside(Chain, ("optim", "storage_resize"), mixed_precision_policy=MixedPrecisionPolicy())
