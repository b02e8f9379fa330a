"""Computing with shards: as with whole tensors, wherever their rows are cut, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import pair, reread
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError, LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def test_shards_are_pickled_as_they_are_cut() -> None:
    """And compute right afterwards; other placements are refused, as are lost changes."""
    model, plain = pair(3)
    for full_name, p in model.named_parameters():
        whole = plain.get_parameter(full_name.removeprefix("module.")).detach()
        again = reread(p.detach(), weights_only=False)
        same("kind", isinstance(again, DTensor), True)
        close("a sum", again.sum().full_tensor(), whole.sum())
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
    uneven = [p for p in model.parameters() if getattr(p.detach(), "_mfsdp_cut", None)]
    assert uneven, "no parameter is cut in another way than torch would"
    for p in uneven:
        refuses(LifecycleError, "gather_full(tensor)", lambda q=p: q.detach()[0])
    every = [(n, p.detach()) for n, p in model.named_parameters()]
    torch._foreach_mul_([p for _, p in every], 2.0)
    for name, p in every:
        whole = plain.get_parameter(name.removeprefix("module.")).detach()
        close("all at once", mfsdp_core.gather_full(p), 2 * whole)


class _Hooked(torch.Tensor):
    """Brings hooks for its gather."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Never called."""


def test_tensors_with_hooks_for_their_gather_are_refused() -> None:
    """They would be gathered in full without a word."""
    linear = nn.Linear(2, 2, bias=False)
    value: Tensor = torch.ones(2, 2).as_subclass(_Hooked)
    linear.weight = nn.Parameter(value)
    words = "gathered by its own fsdp_pre_all_gather"
    refuses(CapabilityNotBuiltError, words, mfsdp_core.fully_shard_model, linear)


def test_optimizers_that_keep_codes_in_blocks_are_refused() -> None:
    """As torchao's, which is known by its module."""
    model = mfsdp_core.fully_shard_model(nn.Linear(2, 2))
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    words = "AdamW8bit keeps moments as codes"
    prepare = mfsdp_core.fully_shard_optimizer
    refuses(ConfigurationError, words, lambda: prepare(kind(model.parameters())))


def test_the_reference_codec_has_headroom_and_a_history() -> None:
    """By default."""
    codec = mfsdp_core.Float8Reference("delayed")
    same("headroom and history", (codec.margin, codec.history), (0, 16))
