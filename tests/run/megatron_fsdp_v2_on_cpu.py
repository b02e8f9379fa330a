"""The second megatron_fsdp on CPU ranks: its own code, with streams that do nothing.

On a CPU everything happens in the order of the program, so a stream has nothing to order.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.engines.megatron_fsdp_v2 import MegatronFsdpV2Engine
from bench.errors import UnsupportedError
from bench.spec import ResolvedRun


class InOrder:
    """A stream or an event."""

    device = None

    def wait_stream(self, _other: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def wait(self) -> None: ...

    def record_event(self) -> InOrder:
        return self


class Gloo:
    """torch.distributed, with the mean over ranks that gloo lacks."""

    ReduceOp = dist.ReduceOp
    all_gather_into_tensor = staticmethod(dist.all_gather_into_tensor)

    @staticmethod
    def reduce_scatter_tensor(output: Any, input: Any, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.AVG
        dist.reduce_scatter_tensor(output, input / group.size(), group=group)

    @staticmethod
    def all_reduce(tensor: Any, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.AVG
        dist.all_reduce(tensor.div_(group.size()), group=group)


def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> MegatronFsdpV2Engine:
    from megatron_fsdp.experimental import dbuffer

    asked = (resolved.strategy, resolved.engine.outer_strategy)
    if asked != ("optim_grads_params", "no_shard"):
        raise UnsupportedError("not-offered", "it shards all, with replicas outside")
    streams_do_nothing()
    dbuffer.dist = Gloo
    return MegatronFsdpV2Engine(model, resolved, device)


class OnlyDevice(str):
    """A device for torch, and its index in words."""

    def __new__(cls) -> OnlyDevice:
        return super().__new__(cls, "cpu")

    def __format__(self, _spec: str) -> str:
        return "0"


def streams_do_nothing() -> None:
    """And there is one device."""
    cuda: dict[str, Any] = dict.fromkeys(("Stream", "current_stream"), lambda *_: InOrder())
    cuda |= dict.fromkeys(("stream", "device"), lambda *_: nullcontext())
    cuda |= {"current_device": OnlyDevice, "synchronize": lambda *_: None}
    for name, stand_in in cuda.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.cuda = lambda tensor: tensor
