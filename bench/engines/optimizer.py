"""The optimizer of every engine: same hyperparameters for all parameters, decay on everything."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.dtypes import TORCH_DTYPES, local_tensor
from bench.engines.precision_aware_adamw import PrecisionAwareAdamW
from bench.errors import UnsupportedError
from bench.models.sharding import units
from bench.spec import TrainSpec

_MATRIX = 2
"""Dimensions of a weight that Muon steps."""


def clip_shards(
    shards: Sequence[Tensor],
    max_norm: float,
    groups: Iterable[dist.ProcessGroup],
    device: torch.device | None = None,
) -> Tensor:
    """Clip shards of gradients in place by the norm of all of them, as torch's clipping does.

    The norm is a root of FP64 sums of squares over `groups`. Collective. All shards of a dtype are
    read by one kernel, and scaled by one. device: of `shards`, where a rank may have none.
    """
    device = device or shards[0].device
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        if shard.numel():
            by_dtype.setdefault(shard.dtype, []).append(shard)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for dtype, several in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm(several, 2, dtype=wide)
        square += torch.stack(norms).double().square_().sum()
    for group in groups:
        dist.all_reduce(square, group=group)  # noqa: TID251 - for engines without a call for it
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype, several in by_dtype.items():
        torch._foreach_mul_(several, factor.to(dtype))
    return norm


def build_optimizer(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    train: TrainSpec,
    *,
    capturable_on: torch.device | None = None,
    decoupled: bool = False,
) -> torch.optim.Optimizer:
    """AdamW with decoupled decay, its precision-aware forms, plain SGD (no momentum), or Muon.

    capturable_on: keep AdamW's numbers on this device, where a graph reads them. decoupled:
    `fused_adam` reads `decoupled_grad`, as `precision_aware_adamw` does where there is one.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay)
    if train.optimizer == "muon":  # one learning rate serves it and the AdamW of other weights
        own = {"lr": train.lr, "weight_decay": train.weight_decay}
        return torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **own)  # type: ignore[arg-type]
    shared: dict[str, Any] = train.model_dump(include={"lr", "eps", "weight_decay"})
    shared["betas"] = (train.beta1, train.beta2)
    state_dtype = TORCH_DTYPES[train.state_dtype]
    if train.optimizer == "precision_aware_adamw":
        return PrecisionAwareAdamW(
            parameters,
            state_dtype=state_dtype,
            master_weights=train.master_weights,
            store_remainders=train.store_remainders,
            **shared,
        )
    if train.optimizer == "fused_adam":
        # Remainders are kept in place of the low half of its own weights.
        module = importlib.import_module("transformer_engine.pytorch.optimizers")
        made: torch.optim.Optimizer = module.FusedAdam(
            parameters,
            master_weights=train.master_weights or train.store_remainders,
            store_param_remainders=train.store_remainders,
            exp_avg_dtype=state_dtype,
            exp_avg_sq_dtype=state_dtype,
            use_decoupled_grad=decoupled,
            **shared,
        )
        return made
    if capturable_on is not None:
        shared |= {"lr": torch.tensor(train.lr, device=capturable_on), "capturable": True}
    return torch.optim.AdamW(parameters, **shared)


class SeveralOptimizers:
    """Optimizers that step one after another, as far as an engine knows one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of all."""
        return {
            key: value for optimizer in self._optimizers for key, value in optimizer.state.items()
        }

    def step(self) -> None:
        """Of each."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Of each."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def optimizers_of(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    train: TrainSpec,
    build: Callable[[list[nn.Parameter], TrainSpec], torch.optim.Optimizer],
) -> Any:
    """What steps `parameters` of `model`, wrapped or not.

    Muon is given the 2-D weights of units, and AdamW the rest.

    Raises:
        UnsupportedError: muon, and no unit has such a weight.
    """
    if train.optimizer != "muon":
        return build(list(parameters), train)
    of_units = [p for unit in units(getattr(model, "module", model)) for p in unit.parameters()]
    inside = {p for p in of_units if p.ndim == _MATRIX}
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in parameters:
        parts[parameter not in inside].append(parameter)
    if not parts[0]:
        raise UnsupportedError(
            "muon-needs-matrices",
            "train.optimizer=muon steps the 2-D weights of units, and no unit of the model has one:"
            " name unit_classes, or use adamw",
        )
    adamw = train.model_copy(update={"optimizer": "adamw"})
    return SeveralOptimizers(
        [build(own, how) for own, how in zip(parts, (train, adamw), strict=True) if own]
    )


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Used by the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of all state tensors on this rank; 0 before the first step."""
    return sum(
        local_tensor(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
