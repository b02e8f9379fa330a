"""What is kept of a validation: plain data, versioned, torch-free. Files are `bench.store`'s.

Steps and microbatches count from 1, ranks from 0, as everywhere a person reads them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from bench.record import SCHEMA_VERSION

CheckState = Literal["passed", "failed", "not_applicable"]


class Kept(BaseModel):
    """Unknown keys, of a newer version, are ignored on reading."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Finding(Kept):
    """The first thing that was wrong. evidence: lines of logs and ledgers that show it.

    position: of the rank in a mesh of two axes and its node, as `outer 1, inner 0, on n2`.
    """

    parameter: str | None = None
    step: int | None = None
    microbatch: int | None = None
    rank: int | None = None
    position: str = ""
    expected: str = ""
    found: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where, as `blocks.0.up.weight, step 2, microbatch 1, rank 0`."""
        parts = [self.parameter] if self.parameter else []
        for name in ("step", "microbatch", "rank"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value}")
        if self.position and self.rank is not None:
            parts[-1] += f" ({self.position})"
        return ", ".join(parts)


class CheckVerdict(Kept):
    """One check of one case. measured: how close it was; reason: why it does not apply."""

    check: str
    state: CheckState
    measured: str = ""
    reason: str = ""
    finding: Finding | None = None


class GradientError(Kept):
    """Of the step in which a whole gradient is furthest off, relative to its norm.

    relative: ||found - expected|| / ||expected||; inf where a gradient is absent.
    """

    parameter: str
    step: int
    max_abs: float
    relative: float


class CaseVerdict(Kept):
    """One case. reason: why it does not apply. cpu_seconds: of all ranks together.

    errors: of every parameter, where requested.
    """

    case: str
    engine: str
    state: CheckState
    settings: dict[str, Any] = {}
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    reason: str = ""
    checks: tuple[CheckVerdict, ...] = ()
    errors: tuple[GradientError, ...] = ()

    @property
    def failures(self) -> tuple[CheckVerdict, ...]:
        """Checks that failed, what failed in an early step first, else in the order of asking."""
        failed = [check for check in self.checks if check.state == "failed"]
        return tuple(sorted(failed, key=lambda c: (c.finding and c.finding.step) or 0))


class ValidationRecord(Kept):
    """`verdict.json` of one validation.

    wanted: what was requested, as `quick`.
    """

    schema_version: int = SCHEMA_VERSION
    id: str = ""
    engines: tuple[str, ...] = ()
    wanted: str = ""
    started_utc: str = ""
    ended_utc: str | None = None
    interrupted: bool = False
    device: str = "cpu"
    environment: dict[str, Any] = {}
    cases: tuple[CaseVerdict, ...] = ()

    def counts(self) -> dict[str, int]:
        """Cases by state."""
        states: tuple[CheckState, ...] = ("passed", "failed", "not_applicable")
        return {state: sum(case.state == state for case in self.cases) for state in states}
