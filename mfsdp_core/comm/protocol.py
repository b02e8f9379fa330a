"""Answers of a collective that is still under way, and the memory that a transport asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Pending(Protocol):
    """A collective that was issued."""

    def wait(self) -> object:
        """Return once the result may be used on the current stream (CPU: once it is there)."""


class PendingSum(Protocol):
    """A reduction that was issued."""

    def wait(self) -> torch.Tensor:
        """Return this rank's result: the tensor it was to go to, or one of higher precision."""


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


class Summed:
    """A reduction whose result goes to a tensor known beforehand."""

    def __init__(self, result: torch.Tensor, pending: Pending) -> None:
        self._result = result
        self._pending = pending

    def wait(self) -> torch.Tensor:
        """That tensor, once the reduction has ended."""
        self._pending.wait()
        return self._result


class Block(Protocol):
    """Memory that a transport needs while a collective is under way: flat, contents undefined."""

    data: torch.Tensor

    def give(self) -> None:
        """Give it back."""


#: By bucket, number of elements and dtype.
Scratch = Callable[[str, int, torch.dtype], Block]
