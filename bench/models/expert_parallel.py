"""Experts spread over the ranks of an expert-parallel group, and the tokens that travel to them.

Every rank sends the copies of its tokens to the ranks that hold their experts, and gets the answers
back (GShard, arXiv:2006.16668). The backward pass sends gradients the same ways. So an expert has
seen the tokens of its whole group, and its gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.models.decoder import Decoder
from bench.models.experts import Experts
from bench.models.meshes import EXPERT


def spread(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave this rank its share of all experts, in place, marked as sharded over `mesh`."""
    group = mesh[EXPERT].get_group()
    values = model.initial_values
    for prefix, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        for parameter in experts.parameters():
            # Router and shared expert are every rank's, whatever they are called.
            parameter.allreduce = True  # type: ignore[attr-defined]
        for name in ("up", "down"):
            part = getattr(experts, name).detach().chunk(group.size())[group.rank()].clone()
            if values is not None:
                values.first_rows[f"{prefix}.{name}"] = group.rank() * part.shape[0]
            parameter = nn.Parameter(part)
            parameter.allreduce = False  # type: ignore[attr-defined]
            setattr(experts, name, parameter)
        experts.exchange = ExpertExchange(group)
    model.expert_mesh = mesh  # type: ignore[assignment]


class ExpertExchange:
    """Sends rows to the experts of the ranks of `group`, which hold equal shares in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        rows: Tensor,
        counts: Sequence[int],
        answer: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> Tensor:
        """What the experts make of `rows`, in their order. Collective.

        Args:
            rows: [tokens, hidden], sorted by expert.
            counts: rows of each expert of the whole group.
            answer: called with rows sorted by the experts held here, and the counts of those.
        """
        ranks = self._group.size()
        sent = torch.tensor(counts, device=rows.device)
        wanted = torch.empty_like(sent)
        dist.all_to_all_single(wanted, sent, group=self._group)
        wanted = wanted.view(ranks, -1)
        sends, receives = sent.view(ranks, -1).sum(1).tolist(), wanted.sum(1).tolist()
        arrived = _AllToAll.apply(rows, sends, receives, self._group)
        # They lie by rank and then by expert.
        expert = torch.arange(wanted.shape[1], device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(wanted.flatten()).argsort(stable=True)
        answers = answer(arrived[order], wanted.sum(0).tolist())
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=rows.device)
        )
        returned: Tensor = _AllToAll.apply(answers[back], receives, sends, self._group)
        return returned


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group: `sends` to each, `receives` from each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.route = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sends, receives, group = ctx.route
        return _all_to_all(gradient, receives, sends, group), None, None, None


def _all_to_all(
    rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)
    return arrived
