"""Engines as somebody else may write them, one right and the others each wrong in one way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.engines.ddp import DdpEngine
from bench.engines.mfsdp import MfsdpEngine
from bench.errors import UnsupportedError
from bench.spec import ResolvedRun


class Replicating(DdpEngine):
    """Right: torch's DistributedDataParallel under another name."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        if resolved.strategy != "no_shard" or resolved.engine.outer_size > 1:
            raise UnsupportedError("replicas-only", "this engine replicates on one axis")
        super().__init__(model, resolved, device)


class Deaf(MfsdpEngine):
    """Was asked for quantised weights, and computes and gathers without a word in BF16."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        engine = resolved.engine.with_settings(recipe="none")
        super().__init__(model, resolved.model_copy(update={"engine": engine}), device)


class Summing(Replicating):
    """Hands over the sum over ranks where the mean is asked for."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        return super().forward_backward(tokens, targets, 2 * scale, is_last)


class Forgetting(Replicating):
    """Loses every microbatch but the last."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        if is_last:
            self.zero_grad()
        return super().forward_backward(tokens, targets, scale, is_last)


class Keeping(Replicating):
    """Never clears its gradients."""

    def zero_grad(self) -> None: ...


class Drifting(Replicating):
    """The second rank's weights change by themselves after a step."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                self.parameters[0].mul_(1 + 1e-6)


class Waiting(Replicating):
    """The second rank leaves out a reduction, and everybody waits."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        takes_part = is_last and torch.distributed.get_rank() == 0
        return super().forward_backward(tokens, targets, scale, takes_part)
