"""torchao's emulated float8 layers under this core, against torch's fully_shard."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.judging import same
from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
    load_checkpoint,
    save_checkpoint,
)
from mfsdp_core.errors import CapabilityNotBuiltError
from oracle.ranks import mesh, two_axes

pytestmark = [pytest.mark.on_ranks, pytest.mark.needs("torchao")]
STEPS = 3


class Unit(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def converted(*, float8_gathers: bool = False, recompute: bool = False) -> nn.Module:
    """Two units whose linear layers multiply in emulated float8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(3)
    model = nn.Sequential(Unit(), Unit())
    config = Float8LinearConfig(
        emulate=True,
        enable_fsdp_float8_all_gather=float8_gathers,
        force_recompute_fp8_weight_in_bwd=recompute,
    )
    return convert_to_float8_training(model, config=config)


def trained(model: Any, optimizer: Any, after_step: Any = None) -> list[float]:
    """Losses of this rank."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank() % 2)
        value = model(torch.randn(16, 32, generator=draw)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        found.append(float(value.detach()))
    return found


def ours(codec: Float8Reference | None = None) -> tuple[list[float], set[str]]:
    """Losses, and the dtypes in which weights were gathered."""
    model = fully_shard_model(
        converted(),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, weight_codec=codec),
    )
    return trained(model, with_sgd(model)), set(model.wire_log.gathered_bytes)


def theirs(*, float8_gathers: bool = False, recompute: bool = False) -> list[float]:
    """The same under torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = converted(float8_gathers=float8_gathers, recompute=recompute)
    for unit in model:
        fully_shard(unit, mesh=mesh(2)["dp"])
    fully_shard(model, mesh=mesh(2)["dp"])
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.5))


def with_sgd(model: Any) -> Any:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))


def test_emulated_float8_layers_train_as_under_fully_shard() -> None:
    found, gathered = ours()
    same("losses", found, theirs())
    assert found[-1] < found[0], found
    assert gathered == {"float32"}


def test_they_train_on_weights_that_are_gathered_as_codes() -> None:
    found, gathered = ours(Float8Reference("current"))
    assert found[-1] < found[0], found
    assert gathered == {"uint8", "float32"}  # matrices and biases


#: Elements of the four matrices, and of the four biases.
MATRICES, BIASES = 4 * 32 * 64, 2 * (32 + 64)


def hooked(recompute: bool = False, **arguments: Any) -> Any:
    """A sharded model whose matrices are gathered by torchao's hooks."""
    return fully_shard_model(
        converted(float8_gathers=True, recompute=recompute),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        **arguments,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_float8_gathers_train_as_under_fully_shard(recompute: bool) -> None:
    expected = theirs(float8_gathers=True, recompute=recompute)
    # A rank sends half of each gather: a byte per weight, four per bias. Weights that stay are
    # there from sharding on.
    for strategy, count, options in (
        (3, 2 * STEPS, {"fsdp_double_buffer": True}),
        (3, 2 * STEPS, {"enable_fine_grained_param_gather": True}),
        (3, 2 * STEPS, {"allocator": "temporary"}),
        (1, STEPS - 1, {}),
        (0, 0, {}),
    ):
        model = hooked(zero_dp_strategy=strategy, recompute=recompute, **options)
        same(f"{strategy} {options}", trained(model, with_sgd(model)), expected)
        sent = model.wire_log.gathered_bytes
        assert sent.get("uint8", 0) == count * MATRICES // 2, sent
        assert sent.get("float32", 0) == count * 4 * BIASES // 2, sent


def test_scales_that_are_computed_ahead_are_used() -> None:
    """No gather computes one itself, and a wrong one has its effect."""
    from torchao.float8 import fsdp_utils

    model = hooked()
    computed = []
    original = fsdp_utils.hp_tensor_to_float8_dynamic

    def counted(*arguments: Any, **options: Any) -> Any:
        computed.append(len(computed))
        return original(*arguments, **options)

    def ahead(model: Any) -> None:
        fsdp_utils.precompute_float8_dynamic_scale_for_fsdp(model)
        computed.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_utils, "hp_tensor_to_float8_dynamic", counted)
        losses = trained(model, with_sgd(model), ahead)
        with torch.no_grad():
            right = model(torch.ones(16, 32))
            model.module[0].up.weight._local_tensor._precomputed_scale *= 1000.0
            wrong = model(torch.ones(16, 32))
    assert not computed
    assert float((right - wrong).abs().max()) > 0.01
    same("losses", losses, theirs(float8_gathers=True))


def test_checkpoints_hold_plain_weights(tmp_path: Path) -> None:
    """And a model of another strategy goes on from one."""
    model = hooked()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    trained(model, optimizer)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    other = hooked(zero_dp_strategy="optim_grads", fsdp_double_buffer=True)
    loaded = fully_shard_optimizer(torch.optim.AdamW(other.parameters(), lr=0.05))
    load_checkpoint(tmp_path / "saved", other, loaded)
    assert type(model.state_dict()["module.0.up.weight"]._local_tensor) is torch.Tensor
    same("losses", trained(other, loaded), trained(model, optimizer))


def test_models_with_float8_gathers_can_be_built_on_meta() -> None:
    with torch.device("meta"):
        blank = converted(float8_gathers=True)
    made = fully_shard_model(
        blank,
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        init_model_with_meta_device=True,
    )
    losses = trained(made, with_sgd(made))
    assert losses[-1] < losses[0], losses


def test_models_with_float8_gathers_can_be_copied_gathered_and_changed() -> None:
    x, model = torch.ones(16, 32), hooked()
    trained(model, with_sgd(model))
    with torch.no_grad():
        first = model(x)
        copied = copy.deepcopy(model.module)[0].up.weight
        same("a copy", gather_full(copied), gather_full(model.module[0].up.weight))
        assert gather_full(model.module[0].up.weight).shape == (64, 32)
        model.module[0].up.weight.mul_(0.5)
        assert float((model(x) - first).abs().max()) > 0.01


def test_hooks_are_refused_where_they_cannot_gather() -> None:
    two, both = two_axes()
    hybrid = {"dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": both}
    hybrid["outer_dp_sharding_strategy"] = "optim"
    model = converted(float8_gathers=True)
    words = (
        "0.up.weight is a WeightWithDynamicFloat8CastTensor"
        ".*not built where the outer axis shards the optimizer"
    )
    with pytest.raises(CapabilityNotBuiltError, match=words):
        fully_shard_model(model, device_mesh=two, **hybrid)
    with pytest.raises(CapabilityNotBuiltError, match="not built with tp_dim"):
        fully_shard_model(model, device_mesh=two, dp_shard_dim="outer", tp_dim="inner")
