"""How a check ends: what it measured is returned, everything else is raised."""

from __future__ import annotations

from torch import Tensor

from bench.verdict import Finding


class WrongError(Exception):
    """The check fails. measured: how far off, in words."""

    def __init__(self, finding: Finding, measured: str = "") -> None:
        super().__init__(finding)
        self.finding = finding
        self.measured = measured


def wrong(step: int | None = None, measured: str = "", **fields: object) -> WrongError:
    """What is wrong, in a step that is counted from 0 here and from 1 for people."""
    counted = None if step is None else step + 1
    return WrongError(Finding.model_validate({"step": counted, **fields}), measured)


class NotApplicableError(Exception):
    """The check cannot be asked of this engine or case; says why."""


def numbers(tensor: Tensor, at: int | None = None) -> str:
    """The first numbers of a tensor, or those around element `at` of it."""
    flat = tensor.detach().flatten()
    start = 0 if at is None else max(0, min(at - 1, flat.numel() - 3))
    shown = ", ".join(f"{value:.6g}" for value in flat[start : start + 3].double().tolist())
    more = ", ..." if flat.numel() > start + 3 else ""
    return f"[{'..., ' if start else ''}{shown}{more}]" if flat.numel() else "no elements"
