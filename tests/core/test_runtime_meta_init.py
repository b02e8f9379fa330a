"""Models built on the meta device get the weights that they would have had without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard, fully_shard_model, gather_full
from mfsdp_core.errors import ConfigurationError
from oracle.ranks import mesh, on_two_axes

pytestmark = pytest.mark.on_ranks

WIDTH = 16


class Layer(nn.Module):
    """A unit with attention, whose parent module draws after its child, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Tied embedding and output, four units, and a parameter and a buffer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.output = nn.Linear(WIDTH, 11, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("positions", torch.empty(WIDTH))
        self.reset_parameters()
        self.output.weight = self.embedding.weight
        self.layers[1].up.weight.requires_grad_(False)
        self.layers[2].up.weight.marked = "kept"

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        with torch.no_grad():
            self.positions.copy_(torch.arange(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.output(self.last(x * self.scale))


def eager() -> Model:
    torch.manual_seed(3)
    return Model()


def meta(module: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return module()


def sharded(
    module: nn.Module,
    strategy: str = "optim_grads_params",
    outer: str | None = None,
    units: Sequence[type[nn.Module]] = (),
) -> Any:
    where: dict[str, Any] = {"device_mesh": mesh(4), "dp_shard_dim": "dp"}
    if outer is not None:
        where = on_two_axes(outer)
    torch.manual_seed(3)
    return fully_shard_model(
        module,
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32),
        **where,
    )


class Helpless(nn.Module):
    """Owns a parameter and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Private(Helpless):
    """Has the other name of the method."""

    def _reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 4.0)


class Growing(nn.Linear):
    """Replaces its parameter by another one when it is reset."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.ones(2, 2))


class Meddling(nn.Module):
    """Sets the weights of its units, which are sharded by then."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.unit.weight)
        nn.init.ones_(self.scale)


class Rounded(nn.Linear):
    """Draws thirds in FP32, holds them in BF16, and keeps them as Transformer Engine does."""

    def reset_parameters(self) -> None:
        drawn = torch.arange(self.weight.numel()).view(self.weight.shape) / 3
        weight: Any = self.weight
        with torch.no_grad():
            weight.copy_(drawn)
        weight.get_high_precision_init_val = lambda: drawn
        weight.clear_high_precision_init_val = lambda: vars(weight).clear()


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("optim", None), ("optim_grads", None), ("optim_grads_params", "optim")],
)
def test_weights_equal_those_of_eager_initialisation_under_the_same_seed(
    strategy: str, outer: str | None
) -> None:
    """Buffers, attributes, ties and an output as well."""
    wanted, model = eager(), sharded(meta(Model), strategy, outer, [Layer])
    values = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    found = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    assert found.keys() == values.keys()
    for name, value in values.items():
        same(name, gather_full(found[name]), value.detach())
    tokens = torch.arange(10).view(2, 5) % 11
    with torch.no_grad():
        wanted.eval()
        model.eval()
        same("output", model(tokens[:, 0]), wanted(tokens[:, 0]))
    assert model.module.layers[2].up.weight.marked == "kept"
    assert model.module.output.weight is model.module.embedding.weight


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_main_weights_begin_with_what_a_rounded_parameter_has_kept(strategy: str) -> None:
    """A forward pass reads them rounded, and what was kept is let go.

    Beside a parameter of the same bucket that has kept nothing.
    """
    module = meta(lambda: nn.Sequential(Rounded(8, 8, False), nn.Linear(8, 1, False)).bfloat16())
    model = sharded(module, strategy)
    first, last = (gather_full(layer.weight).detach() for layer in model.module)
    drawn, ones = torch.arange(64).view(8, 8) / 3, torch.eye(8, dtype=torch.bfloat16)
    same("main weights", first, drawn)
    with torch.no_grad():
        wanted = F.linear(F.linear(ones, drawn.bfloat16()), last.bfloat16())
        same("output", model(ones), wanted)
    assert not hasattr(model.module[0].weight, "get_high_precision_init_val")


def test_weights_are_reset_by_a_method_of_either_name() -> None:
    (weight,) = sharded(meta(Private)).parameters()
    same("weight", gather_full(weight.detach()), torch.full((3,), 4.0))


class Watched(nn.Linear):
    """A layer that notes, whenever it is initialised, how much of the model is in memory."""

    model: nn.Module
    seen: list[int]

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(type(self), "model"):
            real = [p.detach() for p in type(self).model.parameters() if not p.is_meta]
            local = [p.to_local() if isinstance(p, DTensor) else p for p in real]
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in local}
            type(self).seen.append(sum(storages.values()))


def test_the_whole_model_is_never_in_memory() -> None:
    module = meta(lambda: nn.Sequential(*(Watched(64, 64) for _ in range(8))))
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    Watched.model, Watched.seen = module, []
    sharded(module, units=[Watched])
    assert len(Watched.seen) == 8
    # One unit, and shards of those that are finished.
    assert max(Watched.seen) <= whole / 8 + whole / 4, Watched.seen


class ForgetsWeight(nn.Module):
    """Sets one of its two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class ForgetsTables(ForgetsWeight):
    """Sets its weights, and no table that its constructor has made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("places", torch.arange(4))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.shift)


#: A module on the meta device, how it is sharded, and what is said.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "not asked for": (
        lambda: nn.Sequential(meta(lambda: nn.Linear(4, 4))),
        {"init_model_with_meta_device": False},
        "0 have tensors on the meta device",
    ),
    "the root not asked for": (
        lambda: meta(lambda: nn.Linear(4, 4)),
        {"init_model_with_meta_device": False},
        "(root) have tensors on the meta device",
    ),
    "not sharded": (
        lambda: meta(lambda: nn.Linear(4, 4)),
        {"zero_dp_strategy": 0},
        "saves nothing under no_shard",
    ),
    "helpless": (
        lambda: nn.Sequential(meta(Helpless)),
        {},
        "0 (Helpless) have neither",
    ),
    "many helpless": (
        lambda: meta(lambda: nn.ModuleList(Helpless() for _ in range(10))),
        {},
        "and 2 more have neither",
    ),
    "growing": (
        lambda: meta(lambda: Growing(4, 4)),
        {},
        "reset_parameters() of Growing replaced weight",
    ),
    "a weight forgotten": (
        lambda: nn.Sequential(meta(ForgetsWeight)),
        {},
        "0.shift have no values",
    ),
    "a table forgotten": (
        lambda: nn.Sequential(meta(ForgetsTables)),
        {},
        "0.places, 0.table have no values",
    ),
    "meddling": (
        lambda: meta(Meddling),
        {"fsdp_unit_modules": [nn.Linear]},
        "unit.weight were set by reset_parameters() of a module above",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_initialised_is_refused_by_name(case: str) -> None:
    module, arguments, words = REFUSED[case]
    arguments = {"init_model_with_meta_device": True, "device_mesh": mesh(4), **arguments}
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        fully_shard_model(module(), dp_shard_dim="dp", **arguments)


def test_an_optimizer_over_meta_parameters_gets_the_shards() -> None:
    module = meta(Model)
    optimizer = torch.optim.SGD(module.parameters(), lr=1)
    model, optimizer = fully_shard(
        module,
        optimizer,
        device_mesh=mesh(4),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Layer],
        init_model_with_meta_device=True,
    )
    known = {id(parameter) for parameter in model.parameters()}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held
    assert known.issuperset(held)
