"""Short ways to a `CheckVerdict`."""

from __future__ import annotations

from torch import Tensor

from bench.verdict import CheckVerdict, Finding


def passed(check: str, measured: str = "") -> CheckVerdict:
    """It holds."""
    return CheckVerdict(check=check, state="passed", measured=measured)


def failed(check: str, finding: Finding, measured: str = "") -> CheckVerdict:
    """It does not."""
    return CheckVerdict(check=check, state="failed", finding=finding, measured=measured)


def not_applicable(check: str, reason: str) -> CheckVerdict:
    """It cannot be asked of this engine or case."""
    return CheckVerdict(check=check, state="not_applicable", reason=reason)


def numbers(tensor: Tensor, at: int | None = None) -> str:
    """The first numbers of a tensor, or those around element `at` of it."""
    flat = tensor.detach().flatten()
    start = 0 if at is None else max(0, min(at - 1, flat.numel() - 3))
    shown = ", ".join(f"{value:.6g}" for value in flat[start : start + 3].double().tolist())
    more = ", ..." if flat.numel() > start + 3 else ""
    return f"[{'..., ' if start else ''}{shown}{more}]" if flat.numel() else "no elements"
