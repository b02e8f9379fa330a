"""`Inspection` of the engine `deepspeed`: shards are stretches of flattened parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.inspection import Inspection, LocalRows
from bench.models.initialisation import Part

_STAGE_OF_WEIGHTS = 3


class DeepSpeedInspection(Inspection):
    """Of a DeepSpeed engine. package: DeepSpeed. Stage 3 has other names for everything."""

    autocast = False

    def __init__(self, engine: Any, package: Any, stage: int) -> None:
        self._engine = engine
        self._package = package
        self._whole = stage != _STAGE_OF_WEIGHTS

    def _parameters(self) -> dict[str, Any]:
        return dict(self._engine.module.named_parameters())

    def gradients(self) -> dict[str, LocalRows | None]:
        """The averaged gradients of this rank's part, before the step takes them."""
        return {
            name: None if (rows := self._gradient(p)) is None else _part(rows)
            for name, p in self._parameters().items()
            if p.requires_grad
        }

    def gradient_shards(self) -> list[Tensor]:
        """The memory itself, to be clipped in place; without padding."""
        found = [self._gradient(p) for p in self._parameters().values() if p.requires_grad]
        return [one for one in found if one is not None]

    def _gradient(self, parameter: Any) -> Tensor | None:
        if not self._whole:
            optimizer = parameter._z3_optimizer
            if not optimizer.averaged_gradients:
                return None
            found, _ = optimizer._get_fp32_grad_state_partition(parameter, False)
            return _without_padding(found, parameter)
        mapping = parameter._hp_mapping
        if mapping is None:
            return torch.empty(0, dtype=torch.float32, device=parameter.device)
        held = mapping.gradient_dict.get(mapping.param_group_index)
        if held is None:
            return None
        address = mapping.lp_fragment_address
        flat: Tensor = held[parameter._index_in_param_group].flatten()
        # The BF16 optimizer has whole gradients, of which it reads its part.
        whole = flat.numel() == parameter.numel()
        return flat.narrow(0, address.start, address.numel) if whole else flat

    def forget_gradients(self) -> None:
        """Of a cycle that no step followed."""
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "averaged_gradients"):
            optimizer.averaged_gradients.clear()

    def weights(self) -> dict[str, LocalRows]:
        """FP32 main weights of this rank's part; frozen ones as they are."""
        return {name: self._weight(p) for name, p in self._parameters().items()}

    def _weight(self, parameter: Any) -> LocalRows:
        if not self._whole:
            own = parameter.ds_tensor.data
            if parameter.requires_grad:
                own = self._package.utils.safe_get_local_fp32_param(parameter)
            return _part(_without_padding(own, parameter))
        if not parameter.requires_grad:
            return LocalRows(parameter.detach())
        mapping = parameter._hp_mapping
        if mapping is None:
            return _part(torch.empty(0, dtype=torch.float32, device=parameter.device))
        return _part(mapping.hp_fragment.detach())

    def parts(self) -> list[Part]:
        """Of the FP32 main weights."""
        return [
            Part(name, self._weight(p).rows.flatten(), (self._start_of(p),), tuple(_shape(p)))
            for name, p in self._parameters().items()
            if p.requires_grad
        ]

    def compute_parts(self) -> list[Part]:
        """Of the weights that stage 3 gathers."""
        return [
            Part(
                name, _without_padding(p.ds_tensor.data, p), (self._start_of(p),), tuple(_shape(p))
            )
            for name, p in self._parameters().items()
        ]

    def _start_of(self, parameter: Any) -> int:
        if not self._whole:
            return int(dist.get_rank() * parameter.ds_tensor.numel())
        mapping = parameter._hp_mapping
        return 0 if mapping is None else int(mapping.lp_fragment_address.start)

    def whole_weights(self) -> dict[str, Tensor]:
        """DeepSpeed's own way to FP32 values; frozen weights as the module has them."""
        read = self._package.utils.safe_get_full_fp32_param
        found = {}
        for name, parameter in self._parameters().items():
            if parameter.requires_grad:
                found[name] = read(parameter).detach().view(_shape(parameter))
            else:
                with self._package.zero.GatheredParameters([parameter], enabled=not self._whole):
                    found[name] = parameter.detach().clone()
        return found

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A call of the engine under `no_grad`."""
        loss: Tensor = self._engine(tokens, targets)
        return loss


def _part(rows: Tensor) -> LocalRows:
    return LocalRows(rows.detach(), dist.get_rank(), dist.get_world_size(), flat=True)


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Whole, whether or not the parameter is gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _without_padding(rows: Tensor, parameter: Any) -> Tensor:
    """Of a part of stage 3, which are equal on all ranks."""
    flat = rows.flatten()
    before = dist.get_rank() * parameter.ds_tensor.numel()
    return flat[: max(0, min(flat.numel(), parameter.ds_numel - before))]
