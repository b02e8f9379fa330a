"""`Inspection` of the engine `deepspeed`: the parts of a rank, found by DeepSpeed's own addresses.

Its calls for whole gradients and weights (`safe_get_full_grad`) are collectives; what they are made
of is read instead, so that nothing has to be believed and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.inspection import LocalRows, lacks
from bench.engines.stock_inspection import StockInspection
from bench.spec import DtypeName

_WHERE = "deepspeed"
CUTS_PARAMETERS = 3
"""The stage of ZeRO whose parameters are sharded themselves."""


class DeepSpeedInspection(StockInspection):
    """Of `model`, whose parameters DeepSpeed has linked to its partitions.

    clips_in_step: gradients are clipped where nobody can look at them.
    """

    def __init__(self, model: nn.Module, engine: Any, stage: int) -> None:
        super().__init__(model, _WHERE)
        self._engine = engine
        self._cuts_parameters = stage == CUTS_PARAMETERS
        self.clips_in_step = True

    def gradients(self) -> dict[str, LocalRows | None]:
        """What the optimizer's partitions will be handed."""
        found = {n: p for n, p in self._parameters().items() if p.requires_grad}
        if self._cuts_parameters:
            optimizer = self._engine.optimizer
            read = optimizer.get_local_fp32_grad_for_param
            return {name: _cut(p, read(p)) for name, p in found.items()}
        return {name: _linked(p, _gradient) for name, p in found.items()}

    def weights(self) -> dict[str, LocalRows]:
        """FP32 partitions; of frozen parameters, what modules compute with."""
        return {name: self._weight(p) for name, p in self._parameters().items()}

    def _weight(self, parameter: nn.Parameter) -> LocalRows:
        if self._cuts_parameters:
            optimizer = self._engine.optimizer
            part: Any = parameter
            main = optimizer.get_local_fp32_param(part) if part.requires_grad else part.ds_tensor
            return _cut(parameter, main)
        if not parameter.requires_grad:
            return LocalRows(parameter.detach())
        return _linked(parameter, lambda mapping, _: mapping.get_hp_fragment())

    def whole_weights(self) -> dict[str, Tensor]:
        """`safe_get_full_fp32_param`; of frozen parameters, what modules compute with."""
        return {name: self._whole(p) for name, p in self._parameters().items()}

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if parameter.requires_grad:
            whole: Tensor = deepspeed.utils.safe_get_full_fp32_param(parameter)
            return whole.detach()
        if not self._cuts_parameters:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Not offered."""
        raise lacks(_WHERE, f"loads checkpoints of its own, not {len(weights)} tensors")

    def set_wire_dtype(self, dtype: DtypeName) -> None:
        """Not offered."""
        raise lacks(_WHERE, f"cannot change its communication dtype (to {dtype}) once built")


def _linked(parameter: Any, part_of: Any) -> LocalRows:
    """The stretch of a parameter that lies in this rank's flat partition (stages 1 and 2)."""
    order, parts = dist.get_rank(), dist.get_world_size()
    mapping = parameter._hp_mapping
    if mapping is None:
        empty = torch.empty(0, dtype=torch.float32, device=parameter.device)
        return LocalRows(empty, order, parts, flat=True)
    rows = part_of(mapping, parameter).detach().flatten()
    return LocalRows(rows, order, parts, flat=True)


def _gradient(mapping: Any, parameter: Any) -> Tensor:
    found: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return found


def _cut(parameter: Any, part: Tensor) -> LocalRows:
    """Equal stretches, the last ones padded (stage 3)."""
    order, parts = dist.get_rank(), dist.get_world_size()
    there = max(0, min(part.numel(), parameter.ds_numel - order * part.numel()))
    return LocalRows(part.detach().flatten()[:there], order, parts, flat=True)
