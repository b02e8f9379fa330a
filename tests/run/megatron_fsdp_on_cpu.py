"""The first megatron_fsdp on CPU ranks: its own code, with streams that do nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron_fsdp_v2_on_cpu import streams_do_nothing
from torch import Tensor, nn

from bench.engines.megatron_fsdp import MegatronFsdpEngine
from bench.spec import MegatronFsdpSettings, MegatronSwitches, ResolvedRun


class Premultiplied(NamedTuple):
    """NCCL's sum of scaled values."""

    factor: float


def scaled(tensor: Tensor, op: Any) -> Any:
    """Scale in place what gloo would not; what is left for it to do."""
    if isinstance(op, Premultiplied):
        tensor.mul_(op.factor)
        return dist.ReduceOp.SUM
    return op


def let_gloo_be_nccl() -> None:
    """Gathers of unequal sizes, and sums of scaled values."""
    gather, scatter, reduce = dist.all_gather, dist.reduce_scatter_tensor, dist.all_reduce

    def all_gather(tensors: list[Tensor], tensor: Tensor, **options: Any) -> None:
        most = max(one.numel() for one in tensors)
        padded = [one.new_empty(most) for one in tensors]
        gather(padded, nn.functional.pad(tensor, (0, most - tensor.numel())), **options)
        for one, rest in zip(tensors, padded, strict=True):
            one.copy_(rest[: one.numel()])

    def reduce_scatter_tensor(output: Tensor, input: Tensor, op: Any, **options: Any) -> Any:
        return scatter(output, input, op=scaled(input, op), **options)

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        return reduce(tensor, op=scaled(tensor, op), **options)

    dist.all_gather, dist.reduce_scatter_tensor = all_gather, reduce_scatter_tensor
    dist.all_reduce, dist._make_nccl_premul_sum = all_reduce, Premultiplied


def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> MegatronFsdpEngine:
    streams_do_nothing()
    if dist._make_nccl_premul_sum is not Premultiplied:
        let_gloo_be_nccl()
    given = {n: getattr(resolved.engine.settings, n) for n in MegatronSwitches.model_fields}
    own = {"settings": MegatronFsdpSettings(**given)}
    engine = {"engine": resolved.engine.model_copy(update=own)}
    return MegatronFsdpEngine(model, resolved.model_copy(update=engine), device)
