"""Transformer Engine itself, on one device. Skipped, with its own reason, where it cannot run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.models.decoder import recomputed
from bench.models.low_precision import recompute_contexts
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.needs("transformer_engine")]
STEPS = 6
#: Recipe, and the function that says whether this device has it.
RECIPES = {
    "DelayedScaling": "is_fp8_available",
    "Float8CurrentScaling": "is_fp8_available",
    "Float8BlockScaling": "is_fp8_block_scaling_available",
    "MXFP8BlockScaling": "is_mxfp8_available",
}


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Any:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    available, reason = getattr(te, RECIPES[request.param])(return_reason=True)
    if not available:
        pytest.skip(reason)
    return getattr(recipes, request.param)()


class Unit(nn.Module):
    contexts: Any = None

    def __init__(self, *, fuses: bool) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fuses}
        self.up = te.Linear(256, 512, **options)
        self.down = te.Linear(512, 256, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self._run(x)
            if self.contexts is None
            else recomputed(self._run, x, contexts=self.contexts)
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def losses(
    recipe: Any, strategy: int, *, primary: bool, fused: bool, adam: bool, again: bool = False
) -> list[float]:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    with te.quantized_model_init(
        enabled=primary, recipe=recipe, preserve_high_precision_init_val=True
    ):
        module = nn.Sequential(Unit(fuses=fused), Unit(fuses=fused))
    for unit in module if again else ():
        unit.contexts = partial(recompute_contexts, te, recipe)
    model = fully_shard_model(
        module,
        device_mesh=init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)),
        dp_shard_dim="dp",
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[Unit],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
        use_decoupled_grad=adam,
    )
    if adam:
        inner = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, use_decoupled_grad=True)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    optimizer = fully_shard_optimizer(inner)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    x.requires_grad_()  # as the stream that a decoder's first layer gets
    found = []
    for _ in range(STEPS):
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        loss = (y.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("strategy", [1, 2, 3])
@pytest.mark.usefixtures("nccl")
def test_codes_train_alike_whatever_is_sharded(recipe: Any, strategy: int) -> None:
    """On one rank every strategy computes the same; gathers, quantising and release run."""
    wanted = losses(recipe, 0, primary=True, fused=False, adam=False)
    found = losses(recipe, strategy, primary=True, fused=False, adam=False)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert found[-1] < found[0]


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.usefixtures("nccl")
def test_gradients_that_layers_write_change_no_loss(recipe: Any, strategy: int) -> None:
    wanted = losses(recipe, strategy, primary=True, fused=False, adam=False)
    found = losses(recipe, strategy, primary=True, fused=True, adam=False)
    assert found == pytest.approx(wanted, rel=1e-2)


@pytest.mark.usefixtures("nccl")
def test_its_optimizer_trains_as_torchs_does(recipe: Any) -> None:
    wanted = losses(recipe, 3, primary=True, fused=True, adam=False)
    found = losses(recipe, 3, primary=True, fused=True, adam=True)
    assert found == pytest.approx(wanted, rel=1e-2)


@pytest.mark.usefixtures("nccl")
def test_weights_that_are_quantised_by_layers_travel_as_they_are(recipe: Any) -> None:
    found = losses(recipe, 3, primary=False, fused=True, adam=False)
    assert found == pytest.approx(
        losses(recipe, 0, primary=False, fused=True, adam=False), rel=1e-3
    )


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.usefixtures("nccl")
def test_recomputed_layers_train_as_kept_ones(recipe: Any, primary: bool) -> None:
    wanted = losses(recipe, 3, primary=primary, fused=False, adam=False)
    found = losses(recipe, 3, primary=primary, fused=False, adam=False, again=True)
    assert found == pytest.approx(wanted, rel=1e-3)
