"""torchao's emulated float8 layers under this core, against torch's fully_shard."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.errors import CapabilityNotBuiltError
from oracle.ranks import WORLD, RankPool, mesh

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None,
        reason="torchao is not installed: pip install 'mfsdp-bench[fp8]'",
    ),
]
STEPS = 3


class Unit(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def converted(*, float8_gathers: bool = False) -> nn.Module:
    """Two units whose linear layers multiply in emulated float8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(3)
    model = nn.Sequential(Unit(), Unit())
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=float8_gathers)
    return convert_to_float8_training(model, config=config)


def trained(model: Any, optimizer: Any) -> list[float]:
    """Losses of this rank."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank() % 2)
        value = model(torch.randn(16, 32, generator=draw)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(value.detach()))
    return found


def ours(codec: Float8Reference | None = None) -> tuple[list[float], set[str]]:
    """In a rank: losses, and the dtypes in which weights were gathered."""
    model = fully_shard_model(
        converted(),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, weight_codec=codec),
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    return trained(model, optimizer), set(model.wire_log.gathered_bytes)


def theirs() -> list[float]:
    """In a rank: the same under torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = converted()
    for unit in model:
        fully_shard(unit, mesh=mesh(2)["dp"])
    fully_shard(model, mesh=mesh(2)["dp"])
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.5))


def test_emulated_float8_layers_train_as_under_fully_shard(ranks: RankPool) -> None:
    for (found, gathered), expected in zip(ranks.run(ours), ranks.run(theirs), strict=True):
        assert found == expected
        assert found[-1] < found[0]
        assert gathered == {"float32"}


def test_they_train_on_weights_that_are_gathered_as_codes(ranks: RankPool) -> None:
    results = ranks.run(ours, Float8Reference("current"))
    assert len(results) == WORLD
    for found, gathered in results:
        assert found[-1] < found[0]
        assert gathered == {"uint8", "float32"}  # matrices and biases


def refused() -> str:
    """In a rank: what sharding says of weights that want to be gathered by hooks of their own."""
    try:
        fully_shard_model(
            converted(float8_gathers=True),
            device_mesh=mesh(2),
            dp_shard_dim="dp",
            fsdp_unit_modules=[Unit],
        )
    except CapabilityNotBuiltError as error:
        return str(error)
    return "no error"


def test_float8_gathers_of_torchao_are_refused_rather_than_made_in_fp32(ranks: RankPool) -> None:
    for said in ranks.run(refused):
        assert "0.up.weight is a WeightWithDynamicFloat8CastTensor" in said
        assert 'weight_codec=Float8Reference("current")' in said
