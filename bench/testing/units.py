"""The units of toy models. All map [..., width] to the same shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
HIDDEN = 10


class DeliberateError(Exception):
    """Raised by a unit because the program says so."""


def fail(_gradient: Tensor) -> None:
    """A hook of a backward pass."""
    raise DeliberateError


class Unit(nn.Module):
    """Residual; with a branch that may be left out, if it has one, and exceptions on demand.

    first: name of the parameter that "part" freezes.
    """

    first = ""

    def __init__(self, width: int, branched: bool) -> None:
        super().__init__()
        self.width = width
        self.has_branch = branched
        if branched:
            self.branch = nn.Linear(width, width)
        self.fails = ""

    def body(self, x: Tensor) -> Tensor:
        """What the kind of unit computes."""
        raise NotImplementedError

    def forward(self, x: Tensor, branched: bool = True) -> Tensor:
        """The body around the input, with the branch or without."""
        recomputing = torch._C._current_graph_task_id() != -1
        if self.fails == ("recompute" if recomputing else "forward"):
            raise DeliberateError
        y = x + self.body(x)
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(fail)
        return y + self.branch(x).tanh() if branched and self.has_branch else y


class Block(Unit):
    """The unit of most toy models: a two-layer perceptron behind a norm."""

    first = "up.weight"

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def body(self, x: Tensor) -> Tensor:
        """Norm, up, down."""
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


class Conv(Unit):
    """A convolution whose weight is read without calling its module, as fused kernels do."""

    reads_child_weights = True
    first = "conv.weight"

    def __init__(self, _hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.mix = nn.Linear(width, width)

    def body(self, x: Tensor) -> Tensor:
        """Along the rows."""
        rows = x.unsqueeze(0).transpose(1, 2)
        y = F.conv1d(rows, self.conv.weight, self.conv.bias, padding=1, groups=self.width)
        out: Tensor = self.mix(y.transpose(1, 2).squeeze(0)).tanh()
        return out


class Gain(Unit):
    """Parameters that no ranks can share evenly: a scalar and a single row."""

    first = "shift"

    def __init__(self, _hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.full((1, width), 0.1))

    def body(self, x: Tensor) -> Tensor:
        """Scaled and shifted."""
        return (x * self.gain + self.shift).tanh()


class Rows(Unit):
    """Rows of three lengths in one unit."""

    first = "wide.weight"

    def __init__(self, hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.wide = nn.Linear(13, hidden)
        self.back = nn.Linear(hidden, width)

    def body(self, x: Tensor) -> Tensor:
        """On padded inputs."""
        out: Tensor = self.back(self.wide(F.pad(x, (0, 13 - self.width), value=0.5)).tanh())
        return out


class Adapter(Unit):
    """A trained layer behind one that is often frozen, and still passes gradients on."""

    first = "base.weight"

    def __init__(self, _hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.base = nn.Linear(width, width, bias=False)
        self.added = nn.Linear(width, width, bias=False)

    def body(self, x: Tensor) -> Tensor:
        """One layer after the other."""
        out: Tensor = self.added(self.base(x).tanh())
        return out


class Table(Unit):
    """Parameters of a module that nobody calls."""

    first = "rows.1"

    def __init__(self, hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.rows = nn.ParameterList([torch.full((hidden, width), 0.2), torch.full((width,), 0.1)])

    def body(self, x: Tensor) -> Tensor:
        """Products with the table."""
        out: Tensor = (x @ self.rows[0].T @ self.rows[0] + self.rows[1]).tanh()
        return out


class Outer(Unit):
    """A unit around a unit."""

    first = "inner.up.weight"

    def __init__(self, hidden: int, width: int = WIDTH, *, branched: bool = False) -> None:
        super().__init__(width, branched)
        self.inner = Block(hidden, width, branched=branched)
        self.scale = nn.Parameter(torch.full((width,), 0.3))

    def body(self, x: Tensor) -> Tensor:
        """The inner unit, scaled."""
        out: Tensor = self.inner(x) * self.scale
        return out


KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Block, Conv, Gain, Rows, Adapter, Table, Outer)
}


def run_units(units: Iterable[nn.Module], path: str, x: Tensor) -> Tensor:
    """What `path` says, a letter for each unit: `bench.validate.program.LETTERS`."""
    for unit, letter in zip(units, path, strict=True):
        for _ in range(2 if letter in "tCK" else 1):
            x = _run_unit(unit, letter, x)
    return x


def _run_unit(unit: nn.Module, letter: str, x: Tensor) -> Tensor:
    if letter == "s":
        return x
    if letter in "ckCK" and torch.is_grad_enabled():
        result: Tensor = checkpoint(unit, x, use_reentrant=letter in "kK")
        return result
    y: Tensor = unit(x, False) if letter == "p" else unit(x)
    return x if letter == "d" else y
