"""Engine `megatron_fsdp_v2`: the experimental second version in megatron-fsdp 0.6.1. CUDA only.

`megatron_fsdp.experimental.fully_shard` takes over each unit, then the root, in place. Parameters,
gradients and optimizer state are cut along the inner axis of the mesh; an outer axis holds
replicas. What the package does not offer is refused or undone here:
- weights that stay whole on every axis have nothing to gather, which it refuses: no other strategy;
- sharding over the outer axis too fails in its second step, where gradients would have to go back;
- gradients travel in the dtype of the computation, whatever the policy says;
- main weights are made from weights in that dtype: they get the FP32 values afterwards;
- of a weight with two names it makes two, and never reduces the gradients of the module that has
  both: refused.
Every microbatch reduces over the inner axis, the last one over the outer axis as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import StockInspection
from bench.engines.megatron_fsdp import MegatronFsdpEngine, dtype_policy, refuse_other_release
from bench.engines.optimizer import build_optimizer
from bench.errors import UnsupportedError
from bench.models.initialisation import (
    GivenValues,
    Part,
    give_placeholders,
    initial_values,
    write_values,
)
from bench.models.sharding import mesh_of, units
from bench.spec import MegatronFsdpSettings, ResolvedRun


class MegatronFsdpV2Engine(MegatronFsdpEngine):
    """The model, sharded in place; clipping and memory are those of the first version."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        self._package = importlib.import_module("megatron_fsdp")
        refuse_other_release("megatron_fsdp_v2")
        self.v2 = importlib.import_module("megatron_fsdp.experimental")
        self.settings = MegatronFsdpSettings()
        self._registers = False
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if tied := sorted(set(names) - {name for name, _ in model.named_parameters()}):
            raise UnsupportedError(
                "megatron_fsdp_v2_tied",
                f"megatron_fsdp_v2 cannot tie weights; found another name for {', '.join(tied)}",
            )
        values = initial_values(model) or GivenValues(model)
        self.model = model.to(TORCH_DTYPES[resolved.dtypes.compute])
        give_placeholders(self.model, device)
        self._shard(resolved, device)
        write_values(values, self.parts())
        for _, group in self.groups():
            group.sync_model_weight_from_main_weight()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.parameters, resolved.train)
        self.v2.fully_shard_optimizer(self.optimizer)

    def _shard(self, resolved: ResolvedRun, device: torch.device) -> None:
        v2, outer = self.v2, resolved.engine.outer_size
        cut = [v2.Flat()]
        rests, sums = ([v2.Replicate()], [v2.Partial(dist.ReduceOp.AVG)]) if outer > 1 else ([], [])
        mesh = mesh_of(device, dist.get_world_size(), outer=outer)
        placements = v2.Placements(
            dp_axes=list(range(mesh.ndim)),
            parameter=rests + cut,
            gradient=sums + cut,
            optimizer=rests + cut,
        )
        policy = dtype_policy(self._package, resolved.dtypes)
        for module in (*units(self.model), self.model):
            v2.fully_shard(module, mesh, placements, policy)

    def groups(self) -> Iterator[tuple[list[str], Any]]:
        """Names in the bare model, and what the package keeps of these parameters together."""
        for prefix, module in self.model.named_modules():
            for group in getattr(module, "parameter_groups", ()):
                yield (
                    [f"{prefix}.{name}".removeprefix(".") for name in group.parameter_names],
                    group,
                )

    def parts(self) -> list[Part]:
        """Stretches of the main weights, by the package's own layout."""
        parts = []
        for names, group in self.groups():
            main = group.main_weight
            for index, name in enumerate(names):
                if own := main._get_owned_range(index):
                    rows = main.local_buffer.narrow(0, own.buffer_relative_offset, own.numel)
                    shape = tuple(main.layout.tensor_shapes[index])
                    parts.append(Part(name, rows, (own.tensor_relative_offset,), shape))
        return parts

    def _cycle(self, is_last: bool) -> AbstractContextManager[None]:
        cycle: AbstractContextManager[None] = self.v2.microbatch(self.model, is_last)
        return cycle

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return _Inspection(self)

    def code_path(self) -> str:
        """The file of the package."""
        return str(self.v2.__file__)


class _Inspection(StockInspection):
    """Of shards that only the package's own buffers can put together."""

    def __init__(self, engine: MegatronFsdpV2Engine) -> None:
        super().__init__(engine.model, autocast=False)
        self._engine = engine

    def whole_weights(self) -> dict[str, Tensor]:
        """The package's own gather of main weights."""
        weights_by_name: dict[str, Tensor] = {}
        for names, group in self._engine.groups():
            everywhere = [self._engine.v2.Replicate()] * group.main_weight.mesh.ndim
            buffer = group.main_weight.redistribute(everywhere)
            weights_by_name |= {
                name: buffer.get_local_tensor(index) for index, name in enumerate(names)
            }
        return weights_by_name

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Into the package's buffers of main weights; then what is computed with."""
        for names, group in self._engine.groups():
            main = group.main_weight
            full = [weights[name].to(main.dtype) for name in names]
            cut = self._engine.v2.DBuffer.distribute_tensors(full, main.mesh, main.placements)
            main.local_buffer.copy_(cut.local_buffer)
            group.sync_model_weight_from_main_weight()
