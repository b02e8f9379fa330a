"""The optimizer of every engine: same hyperparameters for all parameters, decay on everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.local_tensor import local_tensor
from bench.engines.precision_aware_adamw import PrecisionAwareAdamW
from bench.spec import TrainSpec


def build_optimizer(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    train: TrainSpec,
    *,
    capturable_on: torch.device | None = None,
) -> torch.optim.Optimizer:
    """AdamW with decoupled decay, its precision-aware form, or plain SGD (no momentum).

    capturable_on: keep AdamW's numbers on this device, where a graph reads them.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay)
    if train.optimizer == "precision_aware_adamw":
        return PrecisionAwareAdamW(
            parameters,
            train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            state_dtype=TORCH_DTYPES[train.state_dtype],
            master_weights=train.master_weights,
            store_remainders=train.store_remainders,
        )
    rate = train.lr if capturable_on is None else torch.tensor(train.lr, device=capturable_on)
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        capturable=capturable_on is not None,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Used by the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors on this rank; 0 before the first step."""
    return sum(
        local_tensor(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
