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


class Unclosed(Replicating):
    """Leaves a `no_sync()` open."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        return super().forward_backward(tokens, targets, scale, is_last and False)


class FarOff(Replicating):
    """Computes with a weight of which the last element alone is off, in its last digits."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        last = [p for p in self.parameters if p.dim() > 1][-1].detach().flatten()[-1:]
        kept = last.clone()
        last.mul_(1 + 1e-12)
        loss = super().forward_backward(tokens, targets, scale, is_last)
        last.copy_(kept)
        return loss


class Unclipped(Replicating):
    """Steps with the gradients from before clipping."""

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        self._kept = [p.grad.clone() for p in self.parameters if p.grad is not None]
        return super().clip_grad_norm(max_norm)

    def optimizer_step(self) -> None:
        kept = [p.grad for p in self.parameters]
        for parameter, gradient in zip(self.parameters, getattr(self, "_kept", kept), strict=True):
            parameter.grad = gradient
        vars(self).pop("_kept", None)
        super().optimizer_step()


class Stale(Replicating):
    """Steps with the gradients of the step before."""

    def optimizer_step(self) -> None:
        own = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter, gradient in zip(self.parameters, getattr(self, "_last", own), strict=True):
            parameter.grad = gradient
        super().optimizer_step()
        self._last = own


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


class Poisoned(Replicating):
    """A gradient of the second step is NaN on the second rank, and so is everything after it."""

    _step = 0

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        loss = super().forward_backward(tokens, targets, scale, is_last)
        if self._step == 1 and self.parameters[0].grad is not None:
            self.parameters[0].grad.view(-1)[0] = float("nan")
        return loss

    def zero_grad(self) -> None:
        super().zero_grad()
        self._step += 1


class Advising(Replicating):
    """Raises, with advice below what is wrong."""

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        raise RuntimeError(f"expected a norm, found none\nLook at {max_norm} first.")


class Spinning(Replicating):
    """The second rank does the same for ever."""

    def zero_grad(self) -> None:
        while torch.distributed.get_rank() == 1:
            torch.ones(100).sum()
        super().zero_grad()


class LateForgetting(Replicating):
    """Right up to the last step, whose gradients it loses."""

    _step = 0

    def zero_grad(self) -> None:
        super().zero_grad()
        self._step += 1

    def optimizer_step(self) -> None:
        if self._step == 2:
            self.zero_grad()
        super().optimizer_step()
