"""Computing with sharded weights and gradients: as with whole tensors, or refused."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.torch_version import TorchVersion

from conformance.judging import refuses
from mfsdp_core import fully_shard_optimizer, gather_full
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, distance, own_batch
from oracle.models import Block, loss
from oracle.ranks import on_two_axes

pytestmark = pytest.mark.on_ranks


class Uneven(nn.Module):
    """Whose parameters' rows lie on one rank, or not in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 11)
        self.block = Block(width=11, hidden=5)
        self.scale = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x)) * self.scale.sum() * self.scalar


class Dataless(nn.Module):
    """With parameters that have no elements, in the root and in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(width=8, hidden=5)
        self.block.none = nn.Parameter(torch.empty(0))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.empty.sum()


def _noisy(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of random numbers on a CPU mesh
        return tensor + 0 * torch.rand_like(tensor)


def _saved(tensor: Tensor) -> Tensor:
    """What comes back from a file: this rank's rows."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    if not isinstance(tensor, DTensor):
        return loaded
    assert torch.equal(loaded._local_tensor, tensor._local_tensor)
    return tensor


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "full": lambda t: t.full_tensor() if isinstance(t, DTensor) else t,
    "replicas": lambda t: (
        t.redistribute(placements=[Replicate()] * t.device_mesh.ndim) if _is_shard(t) else t
    ),
    "mean": lambda t: t.mean(),
    "mean of magnitudes": lambda t: t.detach().abs().mean(),
    "mean of squares": lambda t: (t.data * t).mean(),
    "std": lambda t: t.std(),
    "largest": lambda t: t.abs().max(),
    "inf norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm": lambda t: t.norm(),
    "sum": lambda t: t.sum(),
    "sum of rows": lambda t: t.sum(0),
    "mean of rows": lambda t: t.mean(0),
    "product": lambda t: t @ t.mT if t.ndim > 1 else t,
    "flat": lambda t: torch.cat([t.view(-1), t.flatten()]).std() if t.numel() > 1 else t,
    "a row": lambda t: t[0].mean() if t.ndim > 1 else t,
    "rows": lambda t: sum(row.max() for row in t) if t.ndim else t,
    "means of rows": lambda t: t / t.mean(-1, keepdim=True) if t.ndim > 1 else t,
    "normalised rows": lambda t: t / t.norm(dim=1, keepdim=True) if t.ndim > 1 else t,
    "masked": lambda t: torch.where(t > 0, t, 0).masked_fill(t.abs() < 0.1, 1.0),
    "largest by row": lambda t: t.max(1).values if t.ndim > 1 else t,
    "with noise": lambda t: _noisy(t).sum(),
    "close": lambda t: torch.isclose(t, t + 1e-12).all(),
    "has NaN": lambda t: bool(t.isnan().any()),
    "centred": lambda t: t - t.mean(),
    "normalised": lambda t: t / t.norm(),
    "softmax": lambda t: t.softmax(0) if t.ndim else t,
    "in another dtype": lambda t: t.float().std(),
    "cumulated": lambda t: t.cumsum(0) if t.ndim else t,
    "saved": _saved,
    "foreach": lambda t: torch._foreach_norm([t, t], float("inf"))[1],
    "foreach sum": lambda t: torch._foreach_add([t, t], [t, t])[1].mean(),
    "distance": lambda t: torch.dist(t, t * 2),
    "3 norm": lambda t: torch.linalg.vector_norm(t, 3),
    "smallest": lambda t: torch.linalg.vector_norm(t, float("-inf")),
    "norms of columns": lambda t: torch.linalg.vector_norm(t, 2, dim=0) if t.ndim else t,
    "sum of the last": lambda t: t.sum(-1) if t.ndim else t,
    "rows by their norms": lambda t: t / t.norm(dim=-1, keepdim=True) if t.ndim > 1 else t,
    "norms of columns, from behind": lambda t: t.norm(dim=-2) if t.ndim > 1 else t,
    "maxima of rows, from behind": lambda t: t.amax((-1,)) if t.ndim > 1 else t,
    "sorted": lambda t: t.sort(0)[0] if t.ndim else t,
    "like": lambda t: torch.zeros_like(t) + t.clone().mul_(3),
    "with itself": lambda t: t * t + t.square().neg().abs().sqrt(),
}
if torch.__version__ >= TorchVersion("2.12"):  # before, torch knows no median of a DTensor
    COMPUTED["median"] = lambda t: t.median()


#: Computed with shards of any cut; other values may be refused where ranks have uneven rows.
RIGHT = {
    *("full", "replicas", "norm", "3 norm", "sum", "normalised"),
    *("normalised rows", "rows by their norms", "with noise", "saved", "like", "with itself"),
}


def _is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(p.is_shard() for p in tensor.placements)


def compare_computed(plain: nn.Module, model: nn.Module) -> None:
    """All computations on weights of every shape, and on a gradient."""
    sharded = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    for name in ("first.weight", "first.bias", "block.up.weight", "scale", "scalar"):
        parameter = plain.get_parameter(name)
        pairs = [(sharded[name].detach(), parameter.detach())]
        if name == "first.weight":
            gradient = sharded[name].grad
            assert gradient is not None
            pairs += [(gradient, gather_full(gradient))]
        for shard, whole in pairs:
            refused = set()
            for what, function in COMPUTED.items():
                # A sharded scalar is a tensor of one row.
                if what in {"std", "in another dtype", "softmax"} and parameter.numel() == 1:
                    continue
                found = _or_refusal(function, shard)
                if isinstance(found, LifecycleError):
                    refused.add(what)
                    continue
                error = _error(found, function(whole))
                assert error < 1e-6, f"{what} of {name}: off by {error:.3g}"
            assert not refused & RIGHT, refused & RIGHT


def _or_refusal(function: Callable[[Tensor], Any], shard: Tensor) -> Any:
    try:
        return function(shard)
    except LifecycleError as refusal:
        if "gather_full(tensor)" in str(refusal):
            return refusal
        raise


def _error(found: Any, wanted: Any) -> float:
    if isinstance(found, DTensor):
        found = found.full_tensor()
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return float(found is not None and wanted is not None and found != wanted)
    # Of a row of zeros plain torch has NaN or inf too.
    equal = (found == wanted) | (found.isnan() & wanted.isnan())
    return distance(*(one.double().masked_fill(equal, 0.0) for one in (found, wanted)))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PENALTIES: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.norm,
    lambda weight: _whole(weight.norm(3)),
    lambda weight: weight.sum(),
)


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_parameters_without_elements_take_part(way: tuple[str, str]) -> None:
    pair = beside(Dataless, way)
    pair.backward(own_batch(0))
    pair.compare_gradients()


@pytest.mark.parametrize(
    ("way", "outer"),
    [
        (WAYS[0], None),
        (WAYS[3], None),
        *(pytest.param(WAYS[3], outer, marks=pytest.mark.nightly) for outer in (0, 1)),
    ],
)
def test_statistics_of_weights_and_gradients_are_those_of_whole_tensors(
    way: tuple[str, str], outer: int | None
) -> None:
    pair = beside(Uneven, way, **({} if outer is None else on_two_axes(outer)))
    for module in pair.both:
        loss(module(torch.ones(4, 8, dtype=torch.float64))).backward()
    compare_computed(*pair.both)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids="-".join)
def test_penalties_of_weights_move_them_as_plain_torch(way: tuple[str, str]) -> None:
    """A step of a penalty that is computed from the weights, and nothing else."""
    for penalty in PENALTIES:
        pair = beside(Uneven, way)
        for module in pair.both:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            if module is pair.model:
                fully_shard_optimizer(optimizer)
            sum(penalty(parameter) for parameter in module.parameters()).backward()
            optimizer.step()
        pair.compare_weights()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_the_shard_would_not_follow_is_refused() -> None:
    """Where a whole tensor would be changed, or a gradient be lost."""
    pair = beside(Uneven, WAYS[3])
    weight = pair.model.module.scale
    words = "Compute other values with gather_full(tensor)"
    for write in (
        lambda: weight.detach()[0].fill_(0.0),
        lambda: weight.detach().view(1, -1)[0].view(-1).mul_(0.0),
        lambda: weight.detach().__setitem__(0, 1.0),
        lambda: weight.detach().view(-1).zero_(),
        lambda: nn.init.constant_(weight.data[:2], 0.0),
        lambda: weight.detach().mul_(torch.ones(3)),
        lambda: weight.detach() + torch.ones(3),
    ):
        refuses(LifecycleError, words, write)
    penalised = loss(pair.model(own_batch(0, 4, 8))) + weight.full_tensor().norm()
    refuses(LifecycleError, "from the model's forward alone", penalised.backward)
