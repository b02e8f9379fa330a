"""Bugs of public threads as tiny engines: each is its class of mistake, in no code of theirs.

docs/validate.md lists the threads; tests/run/test_validate_engines.py has what the plug-in says.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from bench.engines.dtypes import main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.models.sharding import units
from bench.spec import ResolvedRun
from bench.validate.adapters import from_accelerate, from_callable


def _unreduced(model: nn.Module):
    return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


#: Megatron-LM#7566: nobody averages, which a test with the same data on all ranks cannot see.
not_averaged = from_callable(_unreduced, strategy="no_shard")


def _hybrid_of_one(model: nn.Module):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ddp", "fsdp"))
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return wrapped, torch.optim.AdamW(wrapped.parameters())


#: verl#7493: one rank per sharding group, and torch's FSDP reduces over that group alone.
fsdp_size_of_one = from_callable(_hybrid_of_one, strategy="no_shard")


def _stepped_before(model: nn.Module):
    model, optimizer = _unreduced(nn.parallel.DistributedDataParallel(model))
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
    return model, optimizer


#: Megatron-LM#5974: a step without a gradient makes the moments, and counts as a step.
stepped_before = from_callable(_stepped_before, strategy="no_shard")


def _accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


#: No bug: what accelerate prepares on CPU ranks.
accelerated = from_accelerate(_accelerator)


class Averaging(StockEngine):
    """Right: replicas whose gradients are averaged behind the last microbatch."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        dtypes = resolved.dtypes
        if resolved.strategy != "no_shard":
            raise UnsupportedError("replicas-only", "this engine replicates")
        if {dtypes.compute, dtypes.main_grads, dtypes.grad_comm} != {dtypes.main_params}:
            raise UnsupportedError("one-dtype", "this engine knows one dtype")
        self.resolved = resolved
        super().__init__(model.to(device, main_dtype(dtypes)), resolved)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        loss = scaled_backward(self.model(tokens, targets), scale)
        if is_last:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self.reduce(parameter)
        return loss

    def group(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Ranks that hold it; an expert's gradient has the tokens of its experts' group in it."""
        is_expert = not getattr(parameter, "allreduce", True)
        return self.model.expert_mesh["dp"].get_group() if is_expert else None

    def reduce(self, parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad, group=self.group(parameter))
        parameter.grad.div_(dist.get_world_size())

    def memory_by_category(self) -> dict[str, int]:
        return self.persistent_bytes()

    def wire_bytes(self) -> int | None:
        return None

    def inspection(self) -> StockInspection:
        return StockInspection(self.model, autocast=False)

    def code_path(self) -> str:
        return __file__


class ExpertsTimesTheirGroup(Averaging):
    """Megatron-LM#5956: experts are averaged over their own data-parallel ranks alone."""

    def reduce(self, parameter: nn.Parameter) -> None:
        super().reduce(parameter)
        ranks = dist.get_world_size(self.group(parameter))
        parameter.grad.mul_(dist.get_world_size() / ranks)


class OuterStageLeftOut(Averaging):
    """Megatron-LM#5972: what was put off until the last microbatch does not come to pass."""

    def reduce(self, parameter: nn.Parameter) -> None:
        inner = dist.get_world_size() // self.resolved.engine.outer_size
        if not hasattr(self, "_inner"):
            self._inner, _ = dist.new_subgroups(inner)
        dist.all_reduce(parameter.grad, group=self._inner)
        parameter.grad.div_(inner)


class Overwriting(Averaging):
    """Before each microbatch the gradients of some weights are lost."""

    def forgotten(self) -> list[nn.Parameter]:
        raise NotImplementedError

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        for parameter in self.forgotten():
            parameter.grad = None
        return super().forward_backward(tokens, targets, scale, is_last)


class FusedProductsOverwrite(Overwriting):
    """Megatron-LM#6357: products that write into the main gradient do not add to it."""

    def forgotten(self) -> list[nn.Parameter]:
        return [m.weight for m in self.model.modules() if isinstance(m, nn.Linear)]


class SharedBuffersOverwrite(Overwriting):
    """Fast-LLM#551: units that share a buffer keep the last microbatch; the root's adds up."""

    def forgotten(self) -> list[nn.Parameter]:
        return [p for unit in units(self.model) for p in unit.parameters()]
