"""Which parameters belong to experts, and what a sum over all experts has to know.

Upstream has two marks: Megatron-Core sets `allreduce = False` on a parameter that the ranks of the
dense data-parallel group do not share, and the released package goes by `.experts.` in the name.

Ranks that share an expert are one of several such sets, and the same name means another expert in
each. No rank's mesh holds more than its own set. The sets together are the ranks that share the
dense parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mfsdp_core.errors import ConfigurationError

_NAME_MARK = ".experts."
_ATTRIBUTE = "_mfsdp_expert_scope"


@dataclass(frozen=True)
class ExpertScope:
    """groups: sums over one after another reach all ranks. copies: ranks that share one expert."""

    groups: tuple[dist.ProcessGroup, ...]
    copies: int


def mark_expert(parameter: torch.Tensor, scope: ExpertScope) -> None:
    """Note on a sharded parameter that it is an expert's."""
    setattr(parameter, _ATTRIBUTE, scope)


def expert_scope(parameter: torch.Tensor) -> ExpertScope | None:
    """The note of `mark_expert`; None for a dense parameter."""
    found: ExpertScope | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def is_expert(names: Iterable[str], parameter: torch.Tensor, *, has_expert_mesh: bool) -> bool:
    """Whether the parameter, held under `names`, is sharded over expt_device_mesh.

    Its attribute `allreduce` decides where it has one. A name decides only where there is a mesh
    of experts: without one, every rank holds all of them and they are dense like the rest.

    Raises:
        ConfigurationError: marked by the attribute, and there is no mesh to shard it over: summing
            gradients of different experts would train none of them.
    """
    names = list(names)
    shared = getattr(parameter, "allreduce", None)
    if shared is None:
        return has_expert_mesh and any(_NAME_MARK in f".{name}" for name in names)
    if not shared and not has_expert_mesh:
        raise ConfigurationError(
            f"{names[0]} is marked as an expert's (allreduce=False), and there is no mesh of the "
            "ranks that share an expert. Pass expt_device_mesh."
        )
    return not shared
