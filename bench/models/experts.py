"""Mixture of experts: a sigmoid router, the best few experts per token, one expert for every token.

Routing as in Nemotron 3 Nano and DeepSeek-V3 (arXiv:2412.19437), without their load-balancing bias:
it is no parameter, and which experts a token visits stays a function of the weights alone. Experts
compute only the tokens that chose them, so the work is that of the active parameters. Every expert
has a gradient on every rank (zero where no token chose it), because all of them are one parameter.

How many tokens an expert gets stays on the device where one grouped product can serve all experts;
so a CUDA graph can hold it. Experts of other ranks, FP64 and odd widths need counts on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.models.decoder import Decoder
from bench.models.sharding import EXPERT
from bench.spec import HybridShape

#: Rows sorted by expert, counts of all experts, and what answers those held here, to all answers.
Exchange = Callable[[Tensor, Sequence[int], Callable[[Tensor, Sequence[int]], Tensor]], Tensor]

_WIDEST_BYTES = 4
_ROW_BYTES = 16


class SquaredReLU(nn.Module):
    """Feed-forward down(relu(up(x))^2) (Primer, arXiv:2109.08668); no gate, no bias."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class Experts(nn.Module):
    """Routed experts, stacked row upon row in two matrices, and the shared one.

    up: [experts * expert_hidden, hidden]. down: [experts * hidden, expert_hidden]. Two dims, so
    that a flat layout may cut them at any row and a large expert count causes no padding.
    exchange: reaches the experts of other ranks, where this one holds a share (`spread`).
    """

    def __init__(self, hidden: int, hybrid: HybridShape) -> None:
        super().__init__()
        self.hybrid = hybrid
        self.exchange: Exchange | None = None
        self.router = nn.Linear(hidden, hybrid.experts, bias=False)
        self.up = nn.Parameter(torch.empty(hybrid.experts * hybrid.expert_hidden, hidden))
        self.down = nn.Parameter(torch.empty(hybrid.experts * hidden, hybrid.expert_hidden))
        width = hybrid.shared_expert_hidden
        self.shared = SquaredReLU(hidden, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        tokens = x.flatten(0, 1)
        shares, chosen = self._route(tokens)
        visits = chosen.flatten()
        # Stable, so that equal inputs are summed in equal order.
        order = visits.argsort(stable=True)
        per_token = self.hybrid.experts_per_token
        copies = tokens.unsqueeze(1).expand(-1, per_token, -1).flatten(0, 1)[order]
        if self.exchange is None and self._is_grouped(tokens):
            answers = self._grouped(copies, visits[order])
        else:
            counts = visits.bincount(minlength=self.hybrid.experts).tolist()
            answers = (self.exchange or _here)(copies, counts, self._answer)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=x.device)
        )
        each = answers[back].unflatten(0, (-1, per_token))
        out: Tensor = (each * shares.to(each.dtype).unsqueeze(-1)).sum(1).view(x.shape)
        if self.shared is not None:
            out = out + self.shared(x)
        return out

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Shares (their sum is `routed_scale`) and numbers of each token's experts, [tokens, k].

        In FP32 or wider under every engine: a rounding here would send tokens elsewhere.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = F.linear(tokens.to(wide), self.router.weight.to(wide)).sigmoid()
            best, chosen = scores.topk(self.hybrid.experts_per_token, dim=-1)
            shares = best / best.sum(-1, keepdim=True) * self.hybrid.routed_scale
        return shares, chosen

    def _is_grouped(self, tokens: Tensor) -> bool:
        """Whether `grouped_mm` takes it: no FP64, and rows of whole 16 bytes."""
        widths = (self.up.shape[1], self.down.shape[1])
        size = _product_dtype(tokens).itemsize
        return size <= _WIDEST_BYTES and not any(width * size % _ROW_BYTES for width in widths)

    def _grouped(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """As `_answer`; numbers: of the expert of each row, in order."""
        experts, dtype = self.hybrid.experts, _product_dtype(tokens)
        ends = torch.searchsorted(
            numbers, torch.arange(experts, device=numbers.device), right=True, out_int32=True
        )
        up, down = (
            matrix.to(dtype).unflatten(0, (experts, -1)).transpose(1, 2)
            for matrix in (self.up, self.down)
        )
        inner = F.relu(F.grouped_mm(tokens.to(dtype), up, offs=ends)).square()
        out: Tensor = F.grouped_mm(inner, down, offs=ends)
        return out

    def _answer(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens sorted by expert, `counts` of each, to what the experts make of them."""
        ups = self.up.unflatten(0, (len(counts), -1)).unbind()
        downs = self.down.unflatten(0, (len(counts), -1)).unbind()
        return torch.cat(
            [
                F.linear(F.relu(F.linear(part, up)).square(), down)
                for part, up, down in zip(tokens.split(list(counts)), ups, downs, strict=True)
            ]
        )


def _here(
    tokens: Tensor, counts: Sequence[int], answer: Callable[[Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """The exchange of a rank that holds all experts."""
    return answer(tokens, counts)


def _product_dtype(tokens: Tensor) -> torch.dtype:
    """What a product under autocast computes in, which does not know the grouped one."""
    kind = tokens.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype


def spread(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave this rank its share of all experts, in place, marked as sharded over `mesh`.

    Every rank sends the copies of its tokens to the ranks that hold their experts, and gets the
    answers back (GShard, arXiv:2006.16668). The backward pass sends gradients the same ways. So an
    expert has seen the tokens of its whole group, and its gradient is their sum.
    """
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
