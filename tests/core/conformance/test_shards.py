"""Computing with shards: as with whole tensors, wherever their rows are cut, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mfsdp_core
from bench.testing.quantised import quantised
from conformance.judging import close, refuses, same
from conformance.small_model import batch, pair
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError, LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_MEANINGS: tuple[Callable[[Any], Any], ...] = (
    lambda t: t * 2 + 1,
    lambda t: t.abs().sqrt().neg(),
    lambda t: (t > 0).to(t.dtype),
    torch.sum,
    torch.mean,
    lambda t: t.sum(0),
    lambda t: t.sum(-1),
    torch.std,
    torch.amax,
    lambda t: torch.linalg.vector_norm(t, 2),
    lambda t: torch.linalg.vector_norm(t, 3),
    lambda t: torch.linalg.vector_norm(t, float("inf")),
    lambda t: torch.linalg.vector_norm(t, float("-inf")),
    lambda t: torch.linalg.vector_norm(t, 2, dim=0),
    lambda t: t.softmax(0),
    lambda t: t.cumsum(0),
    lambda t: t.sort(0)[0],
    lambda t: torch.zeros_like(t) + t,
    lambda t: t.clone().mul_(3),
    lambda t: torch._foreach_add([t, t], 1)[1],
    lambda t: torch.stack(torch._foreach_norm([t])).sum(),
)


def test_operations_mean_what_they_mean_on_whole_tensors() -> None:
    """Of elements, rows, all of it and across rows; alone, with each other, and with plain ones."""
    for strategy in (0, 3):
        model, plain = pair(strategy)
        values = dict(plain.named_parameters())
        for full_name, p in model.named_parameters():
            name = full_name.removeprefix("module.")
            shard, whole = p.detach(), values[name].detach()
            for number, operation in enumerate(_MEANINGS):
                found, wanted = operation(shard), operation(whole)
                close(f"{name}, operation {number}", _whole(found), wanted)
            other = mfsdp_core.gather_full(shard * shard + shard.square())
            close("with itself", other, 2 * whole.square())
            close("whole", shard.full_tensor(), whole)
            close("replicated", shard.redistribute(placements=[Replicate()]).to_local(), whole)
            one = torch.ones(1, dtype=torch.float64)
            row = distribute_tensor(one, shard.device_mesh, [Replicate()])
            close("with replicas", mfsdp_core.gather_full(shard + row), whole + 1)


def _whole(found: DTensor) -> Tensor:
    if any(placement.is_partial() for placement in found.placements):
        return found.full_tensor()
    return mfsdp_core.gather_full(found)


def test_shards_are_pickled_as_they_are_cut() -> None:
    """And compute right afterwards; other placements are refused, as are lost changes."""
    model, plain = pair(3)
    for full_name, p in model.named_parameters():
        whole = plain.get_parameter(full_name.removeprefix("module.")).detach()
        stream = io.BytesIO()
        torch.save(p.detach(), stream)
        stream.seek(0)
        again = torch.load(stream, weights_only=False)
        same("kind", isinstance(again, DTensor), True)
        close("a mean", mfsdp_core.gather_full(again.mean()), whole.mean())
        close("the whole", mfsdp_core.gather_full(again), whole)
        local = distribute_tensor(whole, p.device_mesh, [Shard(0)]).to_local()
        if local.shape != p.detach().to_local().shape:
            refuses(
                LifecycleError,
                "expected replicas",
                lambda q=p: q.detach().redistribute(placements=[Shard(q.ndim - 1)]),
            )
    convolution, same_whole = pair(3, lambda: nn.Conv2d(2, 6, (3, 5)), fsdp_unit_modules=())
    for p, q in zip(convolution.parameters(), same_whole.parameters(), strict=True):
        same("stride", (p.stride(), p.to_local().stride()), (q.stride(), q.stride()))
    uneven = [
        (n, p) for n, p in model.named_parameters() if getattr(p.detach(), "_mfsdp_cut", None)
    ]
    assert uneven, "no parameter is cut in another way than torch would"
    for name, p in uneven:
        row = plain.get_parameter(name.removeprefix("module.")).detach()[0]
        try:
            found = p.detach()[0]
        except LifecycleError:
            continue
        close("the first row", _whole(found), row)
        refuses(LifecycleError, "", lambda view=found: view.add_(1))
    every = [(n, p.detach()) for n, p in model.named_parameters()]
    torch._foreach_mul_([p for _, p in every], 2.0)
    for name, p in every:
        whole = plain.get_parameter(name.removeprefix("module.")).detach()
        close("all at once", mfsdp_core.gather_full(p), 2 * whole)


def test_quantised_weights_may_travel_as_values() -> None:
    """The same weights at other bytes: losses of both are those of quantised plain weights."""
    for recipe in ("delayed", "current", "block"):
        for gathers in ("recipe", "compute"):
            codec = mfsdp_core.Float8Reference(recipe, gathers)
            policy = mfsdp_core.MixedPrecisionPolicy(torch.float32, weight_codec=codec)
            model, plain = pair(3, dtype=torch.float32, mixed_precision_policy=policy)
            with torch.no_grad():
                for p in plain.parameters():
                    p.copy_(quantised(recipe, p.detach(), torch.float32))
            x = batch(dtype=torch.float32)
            close(f"{recipe} {gathers}", model(x).detach(), plain(x).detach(), 1e-6)
    # Two whole blocks of columns and a part of one.
    codec = mfsdp_core.Float8Reference("mxfp8")
    policy = mfsdp_core.MixedPrecisionPolicy(torch.float32, weight_codec=codec)
    options: Any = {"dtype": torch.float32, "mixed_precision_policy": policy}
    model, plain = pair(3, _wide, **options)
    with torch.no_grad():
        plain.weight.copy_(quantised("mxfp8", plain.weight, torch.float32))
    x = torch.linspace(-1, 1, 66).expand(3, 66)
    close("wide rows", model(x).detach(), plain(x).detach(), 1e-5)


def _wide() -> nn.Module:
    return nn.Linear(66, 5)


class _Half(torch.Tensor):
    """Has one of the two hooks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Never called."""


class _Both(_Half):
    """Has both, and no values that could be found."""

    def fsdp_post_all_gather(self, *_: Any) -> Any:
        """Never called."""


def test_odd_tensors_are_refused() -> None:
    """With one hook for gathers, or with values that nobody finds."""
    for kind, error, words in (
        (_Half, ConfigurationError, "and no fsdp_post_all_gather"),
        (_Both, CapabilityNotBuiltError, "keeps its values in other than one tensor"),
    ):
        linear = nn.Linear(2, 2, bias=False)
        value: Tensor = torch.ones(2, 2).as_subclass(kind)
        linear.weight = nn.Parameter(value)
        refuses(error, words, lambda m=linear: mfsdp_core.fully_shard_model(m))
    same("main weights", mfsdp_core.MixedPrecisionPolicy().main_params_dtype, torch.float32)
    codec = mfsdp_core.Float8Reference("delayed")
    same("headroom and history", (codec.margin, codec.history), (0, 16))
    policy = mfsdp_core.MixedPrecisionPolicy()
    same(
        "left open",
        (policy.main_grads_dtype, policy.grad_comm_dtype, policy.weight_codec),
        (None,) * 3,
    )
    refuses(
        ConfigurationError,
        "found no takes",
        lambda: mfsdp_core.MixedPrecisionPolicy(weight_codec=3),
    )
