"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) in plain torch operations, on any device.

Per head, with state S of [head_dim, state], input u_t = step_t * x_t and a = -exp(log_decay):

    S_t = exp(step_t * a) S_{t-1} + u_t B_t^T        y_t = S_t C_t + skip * x_t

`scan` computes this chunk by chunk: within a chunk as masked products of [chunk, chunk], between
chunks by carrying S. Everything inside runs in FP32 or wider, also under autocast: the decays are
exponentials of sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.decoder import GroupedRMSNorm
from bench.spec import HybridShape


def scan(  # noqa: PLR0917 - the symbols of the recurrence
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int
) -> Tensor:
    """Result without the skip term, [batch, seq_len, heads, head_dim].

    Args:
        x: [batch, seq_len, heads, head_dim].
        step: step sizes, positive, [batch, seq_len, heads].
        a: decay per unit of step, negative, [heads].
        b: [batch, seq_len, groups, state]; consecutive heads share a group.
        c: like `b`.
        chunk: tokens per chunk; the last one may have fewer.
    """
    batch, length, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    chunk = min(chunk, length)
    # A step of zero neither decays nor adds, so padded tokens change nothing.
    u, decay, b, c = (_chunked(t, chunk) for t in (x * step.unsqueeze(-1), step * a, b, c))
    shape = (groups, heads // groups)
    u = u.unflatten(3, shape)
    summed = decay.cumsum(2).unflatten(3, shape).permute(0, 1, 3, 4, 2)
    # Letters: n batch, k chunk, q and s positions, g group, h head of it, p channel, m state.
    gaps = summed.unsqueeze(-1) - summed.unsqueeze(-2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    reach = gaps.masked_fill(later, -torch.inf).exp()
    scores = torch.einsum("nkqgm,nksgm->nkgqs", c, b).unsqueeze(3)
    within = torch.einsum("nkghqs,nksghp->nkqghp", scores * reach, u)
    to_end = (summed[..., -1:] - summed).exp().permute(0, 1, 4, 2, 3)
    added = torch.einsum("nksgm,nksghp->nkghpm", b, u * to_end.unsqueeze(-1))
    whole_chunk = summed[..., -1].exp()[..., None, None]
    carried = x.new_zeros(batch, *shape, head_dim, state)
    before = []
    for index in range(added.shape[1]):
        before.append(carried)
        carried = carried * whole_chunk[:, index] + added[:, index]
    across = torch.einsum("nkqgm,nkghpm->nkqghp", c, torch.stack(before, 1))
    from_start = summed.exp().permute(0, 1, 4, 2, 3)
    y: Tensor = (within + across * from_start.unsqueeze(-1)).flatten(3, 4).flatten(1, 2)
    return y[:, :length]


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[batch, seq_len, ...] to [batch, chunks, chunk, ...], zeros at the end."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    out: Tensor = x.unflatten(1, (-1, chunk))
    return out


class Mamba(nn.Module):
    """The mixer of a Mamba-2 block: projection, short convolution, scan, gated norm, projection.

    The convolution's weights are its own parameters, not those of a child module that nobody calls.
    """

    def __init__(self, hidden: int, hybrid: HybridShape, eps: float) -> None:
        super().__init__()
        self.hybrid = hybrid
        inner, convolved, heads = hybrid.mamba_inner, hybrid.mamba_convolved, hybrid.mamba_heads
        self.input = nn.Linear(hidden, inner + convolved + heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(convolved, 1, hybrid.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(convolved))
        self.log_decay = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = GroupedRMSNorm(inner, hybrid.mamba_groups, eps)
        self.output = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        hybrid = self.hybrid
        sizes = (hybrid.mamba_inner, hybrid.mamba_convolved, hybrid.mamba_heads)
        gate, convolved, step = self.input(x).split(sizes, -1)
        mixed = self._mix(self._convolve(convolved), step)
        out: Tensor = self.output(self.norm(mixed * F.silu(gate)))
        return out

    def _convolve(self, x: Tensor) -> Tensor:
        """Causal, per channel, as a sum of shifted products: the same on every device."""
        kernel = self.hybrid.conv_kernel
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        taps = self.conv_weight.squeeze(1).unbind(1)
        total: Tensor = self.conv_bias
        for index, tap in enumerate(taps):
            total = total + padded[:, index : index + x.shape[1]] * tap
        return F.silu(total)

    def _mix(self, convolved: Tensor, step: Tensor) -> Tensor:
        hybrid, dtype = self.hybrid, convolved.dtype
        shared = hybrid.mamba_groups * hybrid.state
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(convolved.device.type, enabled=False):
            x, b, c = convolved.to(wide).split((hybrid.mamba_inner, shared, shared), -1)
            x = x.unflatten(-1, (hybrid.mamba_heads, hybrid.mamba_head_dim))
            b, c = (t.unflatten(-1, (hybrid.mamba_groups, hybrid.state)) for t in (b, c))
            size = F.softplus(step.to(wide) + self.step_bias.to(wide))
            y = scan(x, size, -self.log_decay.to(wide).exp(), b, c, hybrid.chunk)
            y = y + self.skip.to(wide).unsqueeze(-1) * x
        out: Tensor = y.flatten(-2).to(dtype)
        return out
