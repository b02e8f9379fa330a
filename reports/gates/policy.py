"""What a gate asks of each metric: tolerance, direction, required or advisory. Pure.

The file is read by whoever has a reader of YAML with lines; this module takes plain data and a
function that finds the line of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from bench.errors import UsageError

Metric = Literal["step_time", "throughput", "memory", "loss", "wire_bytes"]
Direction = Literal["lower_is_better", "higher_is_better", "both"]
Requirement = Literal["required", "advisory", "off"]
LossMode = Literal["spread", "bitwise"]

METRICS: tuple[Metric, ...] = get_args(Metric)
TIME_METRICS: frozenset[str] = frozenset({"step_time", "throughput"})
DEFAULT_ALPHA = 0.05

KeyPath = tuple[str | int, ...]
LineOf = Callable[[KeyPath], int]


@dataclass(frozen=True)
class Rule:
    """One metric's part of the policy.

    tolerance: relative change (0.02 is 2 %) that is still called equal; for `loss` the largest
    relative distance between curves, None meaning the bound of the dtype policy. direction: "both"
    calls every change beyond the tolerance a regression. named: whether the file asks for it; a
    required metric that was named and cannot be measured is not passed over.
    """

    gate: Requirement
    tolerance: float | None
    direction: Direction
    mode: LossMode = "spread"
    named: bool = False


DEFAULT_RULES: Mapping[Metric, Rule] = {
    "step_time": Rule("required", 0.02, "lower_is_better"),
    "throughput": Rule("off", 0.02, "higher_is_better"),
    "memory": Rule("required", 0.005, "lower_is_better"),
    "loss": Rule("required", None, "both"),
    "wire_bytes": Rule("required", 0.0, "lower_is_better"),
}
"""Time may change by 2 %, allocator peaks and ledgers by 0.5 %; counted bytes not at all."""


@dataclass(frozen=True)
class Policy:
    """Rules of all metrics; `alpha` is the chance of a false alarm that is accepted."""

    rules: Mapping[Metric, Rule] = field(default_factory=lambda: dict(DEFAULT_RULES))
    alpha: float = DEFAULT_ALPHA
    source: str = "the default policy"

    def active(self) -> list[tuple[Metric, Rule]]:
        """Metrics that are judged, in a fixed order."""
        return [(name, self.rules[name]) for name in METRICS if self.rules[name].gate != "off"]


class PolicyError(UsageError):
    """A policy that cannot be used: one `gates.yaml:LINE: message` for each problem."""


def parse_policy(data: Mapping[str, Any], line_of: LineOf, source: str) -> Policy:
    """The policy in `data`; metrics and keys that are left out keep their defaults.

    Args:
        data: `alpha` and `metrics`, as plain data.
        line_of: line of a key path, counted from 1.
        source: name of the file, for messages.

    Raises:
        PolicyError: every problem with its line.
    """
    reader = _Reader(line_of, source)
    reader.known(data, ("alpha", "metrics"), ())
    alpha = reader.number(data, "alpha", (), DEFAULT_ALPHA, most=0.5)
    written = data.get("metrics", {})
    if not isinstance(written, Mapping):
        reader.report(("metrics",), "expected metrics with their rules, as `step_time: {...}`")
        written = {}
    reader.known(written, METRICS, ("metrics",))
    rules = {
        name: reader.rule(name, written[name]) if name in written else DEFAULT_RULES[name]
        for name in METRICS
    }
    if alpha == 0:
        reader.report(("alpha",), "alpha must be above 0: nothing is ever certain")
    reader.stop_on_problems()
    return Policy(rules, float(alpha or DEFAULT_ALPHA), source)


class _Reader:
    """Checks values and collects what is wrong, so that one run shows every problem."""

    def __init__(self, line_of: LineOf, source: str) -> None:
        self._line_of = line_of
        self._source = source
        self._problems: list[tuple[int, str]] = []

    def report(self, path: KeyPath, message: str) -> None:
        self._problems.append((self._line_of(path), message))

    def stop_on_problems(self) -> None:
        if self._problems:
            raise PolicyError(
                "\n".join(f"{self._source}:{line}: {text}" for line, text in sorted(self._problems))
            )

    def known(self, data: Mapping[str, Any], allowed: Sequence[str], path: KeyPath) -> None:
        for key in data:
            if key not in allowed:
                self.report((*path, key), f"unknown key {key!r}; expected {', '.join(allowed)}")

    def rule(self, name: Metric, written: Any) -> Rule:
        path: KeyPath = ("metrics", name)
        default = replace(DEFAULT_RULES[name], named=True)
        if default.gate == "off":
            default = replace(default, gate="required")  # whoever writes it down wants it
        if not isinstance(written, Mapping):
            self.report(path, f"{name}: expected a mapping such as {{tolerance: 2%}}")
            return default
        keys = ("tolerance", "gate", "direction", *(("mode",) if name == "loss" else ()))
        self.known(written, keys, path)
        direction = self.choice(written, "direction", path, get_args(Direction), default.direction)
        if name == "loss" and direction != "both":
            self.report((*path, "direction"), "loss: a curve that moves is a change either way")
        return Rule(
            gate=cast(
                "Requirement",
                self.choice(written, "gate", path, get_args(Requirement), default.gate),
            ),
            tolerance=self.number(written, "tolerance", path, default.tolerance, most=10.0),
            direction=cast("Direction", direction),
            mode=cast(
                "LossMode", self.choice(written, "mode", path, get_args(LossMode), default.mode)
            ),
            named=True,
        )

    def choice(
        self,
        data: Mapping[str, Any],
        key: str,
        path: KeyPath,
        allowed: Sequence[str],
        default: str,
    ) -> str:
        value = data.get(key, default)
        if value not in allowed:
            self.report(
                (*path, key), f"{key}: expected one of {', '.join(allowed)}, found {value!r}"
            )
            return default
        return str(value)

    def number(
        self,
        data: Mapping[str, Any],
        key: str,
        path: KeyPath,
        default: float | None,
        *,
        most: float,
    ) -> float | None:
        """A fraction (0.02) or a percentage ("2%"), not negative, at most `most`."""
        if key not in data:
            return default
        value = _fraction(data[key])
        if value is None or not 0 <= value <= most:
            self.report(
                (*path, key),
                f"{key}: expected a fraction from 0 to {most:g} or a percentage such as 2%, "
                f"found {data[key]!r}",
            )
            return default
        return value


def _fraction(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip().removesuffix("%")) / 100
        except ValueError:
            return None
    return None
