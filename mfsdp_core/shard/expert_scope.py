"""What a sum over all experts has to know, since no rank's mesh holds more than its own.

Ranks that share an expert are one of several such sets, and the same name means another expert in
each. The sets together are the ranks that share the dense parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

_ATTRIBUTE = "_mfsdp_expert_scope"


@dataclass(frozen=True)
class ExpertScope:
    """groups: summing over each in turn reaches every rank. copies: ranks that share one expert."""

    groups: tuple[dist.ProcessGroup, ...]
    copies: int


def mark_expert(parameter: torch.Tensor, scope: ExpertScope) -> None:
    """Note on a sharded parameter that it is an expert's."""
    setattr(parameter, _ATTRIBUTE, scope)


def expert_scope(parameter: torch.Tensor) -> ExpertScope | None:
    """The note of `mark_expert`; None for a dense parameter."""
    found: ExpertScope | None = getattr(parameter, _ATTRIBUTE, None)
    return found
