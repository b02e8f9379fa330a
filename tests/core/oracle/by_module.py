"""Models whose modules are used in ways that matter when they are gathered one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracle.beside_torch import Pair, beside

WIDTH = 8


class Part(nn.Module):
    """A unit of three modules; `style` says how they are used."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0]
        if self.style == "recomputed":
            x = x + checkpoint(self.first, x, use_reentrant=False)
            return x + checkpoint(self.second, x, use_reentrant=True) * self.scales[1]
        return x + self.second(torch.tanh(self.first(x))) * self.scales[1]


class Attention(nn.Module):
    """A unit whose attention reads the weight of its output projection without calling it."""

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)[None]
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out[0]


class Reader(nn.Module):
    """A unit with a module that reads what another one holds, and says so."""

    class Fused(nn.Module):
        reads_child_weights = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias)

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.fused = self.Fused()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(torch.tanh(self.fused(x)))
        return out


class Gate(nn.Module):
    """Returns its own weight, or a view of it."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.view = view

    def forward(self) -> Tensor:
        return self.w.T if self.view else self.w


class Gated(nn.Module):
    """A unit that multiplies with what its modules return."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.plain, self.turned = Gate(view=False), Gate(view=True)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(x @ self.plain()) @ self.turned())
        return out


class Table(nn.Module):
    """A unit that is recomputed with a module that takes no tensor."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self) -> Tensor:
            return self.w * 1.5

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.bias = self.Bias()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(x)) + self.bias()
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=True)
        return out


class Model(nn.Module):
    """Three units between two linears of the root."""

    def __init__(self, unit: Callable[[str], nn.Module], style: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(unit(style) for _ in range(3))
        self.behind = nn.Linear(WIDTH, 1)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for index, unit in enumerate(self.units):
            if self.style == "outside" and index == 1:
                # Modules of the second unit, which does not run itself.
                x = x + unit.second(torch.tanh(unit.first(x)))  # type: ignore[operator]
            else:
                x = unit(x)
        out: Tensor = self.behind(x)
        return out


UNITS: dict[str, Callable[[str], nn.Module]] = {
    "part": Part,
    "attention": Attention,
    "reader": Reader,
    "gated": Gated,
    "table": Table,
}


def sharded(unit: str, style: str, strategy: str, **arguments: Any) -> Pair:
    """The model in plain torch, and gathered by module over two ranks."""
    return beside(
        lambda: Model(UNITS[unit], style),
        (strategy, arguments.pop("allocator", "storage_resize")),
        units=[UNITS[unit]],  # type: ignore[list-item]
        enable_fine_grained_param_gather=True,
        pool_slots=2,
        **arguments,
    )


def inputs(rank: int, cycle: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * cycle + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=seed)
