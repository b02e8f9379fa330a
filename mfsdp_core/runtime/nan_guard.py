"""Finding a NaN or Inf in a gradient while it still belongs to one rank.

After a reduction every rank holds the same NaN and nobody can tell where it came from. Two checks,
both off by default (README, Decisions, has their cost):

each parameter     as autograd or a fused kernel finishes it: names rank, parameter and microbatch
before reduction   one look at each buffer in the dtype that travels, so that an overflow of the
                   cast shows as well; where gradients accumulate whole it sees their sum, and the
                   culprit may be any microbatch of the cycle

The rank that finds something raises, on its own and at once. See README, "NaN and Inf".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mfsdp_core.errors import NonFiniteGradientError
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.runtime.parameters import ManagedParameter


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A sum of finite numbers may overflow, a sum with a NaN or Inf in it is never finite: one pass
    settles the usual case, a second one with a mask is needed only where the sum is not finite.
    """
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


@dataclass
class NanGuard:
    """Which checks one model wants, and which microbatch of the cycle runs, from 0 on."""

    rank: int
    each_parameter: bool
    before_reduction: bool
    microbatch: int = 0

    def __bool__(self) -> bool:
        """Whether anything is checked."""
        return self.each_parameter or self.before_reduction

    def check_parameter(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Look at the gradient that this microbatch has given a parameter.

        Raises:
            NonFiniteGradientError: it holds a NaN or an Inf.
        """
        if self.each_parameter and not all_finite(gradient):
            when = f"in microbatch {self.microbatch} of the cycle"
            raise self._error([parameter], gradient, when)

    def check_buffer(
        self, parameters: Sequence[ManagedParameter], buffer: DBuffer, *, accumulated: bool
    ) -> None:
        """Look at what is about to be reduced. accumulated: over all microbatches of the cycle.

        Raises:
            NonFiniteGradientError: it holds a NaN or an Inf; names the parameters that do.
        """
        if not self.before_reduction or all_finite(buffer.data):
            return
        found = [i for i in range(len(parameters)) if not all_finite(buffer.tensor(i))]
        if not found:  # in the padding, which no parameter reads
            return
        last = self.microbatch
        when = f"in microbatch {last} of the cycle"
        if accumulated and last > 0:
            when = f"in the sum of microbatches 0 to {last} of the cycle"
        when = f"{when}, before its reduction"
        raise self._error([parameters[i] for i in found], buffer.tensor(found[0]), when)

    def _error(
        self, found: Sequence[ManagedParameter], gradient: torch.Tensor, when: str
    ) -> NonFiniteGradientError:
        nans = int(torch.isnan(gradient).sum())
        infinities = int(torch.isinf(gradient).sum())
        others = [managed.names[0] for managed in found[1:]]
        also = f" Also in: {', '.join(others)}." if others else ""
        message = (
            f"rank {self.rank}: expected a finite gradient of {' = '.join(found[0].names)}, found "
            f"{nans} NaN and {infinities} Inf among {gradient.numel()} elements {when}.{also} "
            "Look at this rank's batch and loss; lower the learning rate or the loss scale."
        )
        return NonFiniteGradientError(
            message,
            rank=self.rank,
            parameters=tuple(name for managed in found for name in managed.names),
            microbatch=self.microbatch,
        )
