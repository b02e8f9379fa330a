"""How a program drives torch's `FullyShardedDataParallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy

from bench.validate.fuzz.drivers.driver import Driver

_SHARDINGS = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


class Fsdp1(Driver):
    """A parameter is a pair of a whole weight and its whole gradient."""

    def shard(self, module: Any) -> tuple[Any, Any]:
        """Every unit and the root."""
        units = set(module.units)
        model = FullyShardedDataParallel(
            module,
            device_mesh=self.mesh(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[_SHARDINGS[self.program.strategy]],
            auto_wrap_policy=CustomPolicy(lambda one: one in units),
            use_orig_params=True,
        )
        return model, self.sgd(model.parameters())

    def sharded(self, model: Any) -> dict[str, Any]:
        """Gathered, both."""
        found = {}
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for name, p in model.named_parameters():
                grad = None if p.grad is None else p.grad.clone()
                found[name.replace("_fsdp_wrapped_module.", "")] = p.detach().clone(), grad
        return found

    def gradient(self, parameter: Any) -> Tensor | None:
        """In a unit that was used, what nobody used has zeros."""
        found: Tensor | None = parameter[1]
        return found if found is not None and found.any() else None

    def weight(self, parameter: Any) -> Tensor:
        """As it was gathered."""
        found: Tensor = parameter[0]
        return found

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """By a state dict."""
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(weights)


DRIVER = Fsdp1
