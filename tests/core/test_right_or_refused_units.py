"""Units that run more often on one rank, modules used past their call, gradients asked for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from bench.testing.hang_clock import stretched
from mfsdp_core import fully_shard_model, fully_shard_optimizer
from mfsdp_core.comm import point_to_point
from mfsdp_core.errors import ConfigurationError, LifecycleError, UnitSelectionError
from oracle.beside_torch import WAYS, beside, near, own_batch
from oracle.models import Chain
from oracle.ranks import WORLD
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


class Attending(nn.Module):
    """Torch's attention computes with the weights of its output projection, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mixed, _ = self.attention(y, y, y, need_weights=False)
        return self.outer(mixed)


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.inner(x), self.outer.weight, self.outer.bias)


class Penalised(Borrowing):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)) + self.outer.weight.norm()


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterList([torch.randn(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held[0]


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(8), nn.Linear(8, 8))


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_the_output_projection_of_torchs_attention_belongs_to_what_is_around(
    way: Sequence[str],
) -> None:
    pair = beside(Attending, way, units=[nn.Linear])
    for module in pair.both:
        module(own_batch(1, 2, 4, 8)).square().sum().backward()
    pair.compare_gradients()


@pytest.mark.parametrize("kind", [Borrowing, Penalised])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids="-".join)
def test_a_weight_used_outside_of_its_unit_is_refused_in_words(
    kind: type[nn.Module], way: Sequence[str]
) -> None:
    model = beside(kind, way, units=[nn.Linear]).model
    with pytest.raises(LifecycleError, match="used while its unit was not running"):
        model(own_batch(1))


@pytest.mark.parametrize(
    ("kind", "unit", "words"),
    [(Holding, nn.ParameterList, "no forward\\(\\)"), (Lazy, nn.Linear, "Run the module once")],
)
def test_a_unit_that_nobody_calls_and_a_weight_without_a_shape_are_refused(
    kind: type[nn.Module], unit: type[nn.Module], words: str
) -> None:
    assert issubclass(UnitSelectionError, ConfigurationError)
    with pytest.raises(ConfigurationError, match=words):
        fully_shard_model(kind(), fsdp_unit_modules=[unit])


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_gradients_asked_for_by_the_name_of_a_shard_are_refused(way: Sequence[str]) -> None:
    model = beside(Chain, way).model
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    shards = list(model.parameters())
    model(own_batch(1)).square().sum().backward(inputs=shards)
    words = r"backward\(inputs=...\) cannot name sharded parameters"
    with pytest.raises(LifecycleError, match=words):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # without a forward pass it does nothing, as under plain torch
    with pytest.raises(RuntimeError):
        model(own_batch(1)[:, :3])
    optimizer.step()  # nor after one that has raised
    model(own_batch(1)).square().sum().backward()
    optimizer.step()
    assert any(shard.grad is not None for shard in shards)


@cache
def impatient(_name: str) -> DeviceMesh:
    """A mesh of two ranks on a group of its own, which breaks after a second of waiting."""
    groups = [
        dist.new_group([first, first + 1], timeout=timedelta(seconds=stretched(1)))
        for first in range(0, WORLD, 2)
    ]
    return DeviceMesh.from_group(groups[dist.get_rank() // 2], "cpu")


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["point_to_point", "point_to_point without tags", "native"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_different_units_never_mix(strategy: str, transport: str) -> None:
    """Right up to the pass that one rank runs otherwise; in evaluation, where nothing reduces."""
    with pytest.MonkeyPatch.context() as patch:
        if transport.endswith("without tags"):  # as NCCL's messages
            patch.setattr(point_to_point, "carries_tags", lambda _group: False)
        pair = beside(
            Chain,
            (strategy, "storage_resize"),
            device_mesh=impatient(transport),
            transport=transport.partition(" ")[0],
        )

    def evaluate(seed: int, repeats: bool) -> None:
        path = (0, 0, 1, 2) if repeats else (0, 1, 2)
        wanted, found = (module(own_batch(seed), path) for module in pair.both)
        near(f"{seed}", found, wanted)

    with torch.no_grad():
        evaluate(0, True)
        evaluate(1, True)
        if strategy == "optim_grads_params":
            with pytest.raises(LifecycleError, match="run it equally often in a pass"):
                evaluate(2, dist.get_rank() % 2 == 0)
        else:
            evaluate(2, dist.get_rank() % 2 == 0)
