"""What a gate asks of each metric: tolerance, direction, required or advisory. Pure.

The file is read by whoever has a reader of YAML with lines; this module takes plain data and a
function that finds the line of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails

from bench.derive.metrics import (
    CURVES,
    Direction,
    LossMode,
    Metric,
    MetricRule,
    Requirement,
    default_rules,
    judged_metrics,
)
from bench.errors import UsageError
from bench.removed import removed

DEFAULT_ALPHA = 0.05
LEAST_ALPHA = 1e-6
"""Below, no number of runs that anybody makes decides."""

KeyPath = tuple[str | int, ...]
LineOf = Callable[[KeyPath], int]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class AllowedRise(_Section):
    """An operation that may be done `count` times more per step, over all ranks, and why.

    operation: as a failed gate names it, `aten._to_copy float32>bfloat16`. bytes: what it may move
    more without being done more often; None for nothing.
    """

    operation: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=0)]
    reason: Annotated[str, Field(min_length=1)]
    bytes: Annotated[int | None, Field(ge=0)] = None


@dataclass(frozen=True)
class Policy:
    """Rules by metric; `alpha` is the chance of a false alarm that is accepted.

    allowed: rises of counts that somebody wanted.
    """

    rules: Mapping[str, MetricRule] = field(default_factory=default_rules)
    allowed: tuple[AllowedRise, ...] = ()
    alpha: float = DEFAULT_ALPHA
    source: str = "the default policy"

    def active(self) -> list[tuple[Metric, MetricRule]]:
        """Metrics that are judged, in a fixed order."""
        return [
            (metric, self.rules[name])
            for name, metric in judged_metrics().items()
            if self.rules[name].gate != "off"
        ]


def parse_policy(data: Mapping[str, Any], line_of: LineOf, source: str) -> Policy:
    """The policy in `data`; metrics and keys that are left out keep their defaults.

    Args:
        data: `alpha` and `metrics`, as plain data.
        line_of: line of a key path, counted from 1.
        source: name of the file, for messages.

    Raises:
        UsageError: every problem, as `gates.yaml:LINE: message`.
    """
    try:
        written = _file_model().model_validate(dict(data))
    except ValidationError as error:
        problems = sorted((line_of(e["loc"]), _message(e)) for e in error.errors())
        lines = [f"{source}:{line}: {text}" for line, text in problems]
        raise UsageError("\n".join(lines)) from error
    metrics: BaseModel = written.metrics  # type: ignore[attr-defined]  # a model made of METRICS
    rules = default_rules()
    for name in metrics.model_fields_set:
        rule = getattr(metrics, name)
        kept = {key: getattr(rule, key) for key in rule.model_fields_set}
        # Whoever writes a metric down that is off wants it.
        gate = "required" if rules[name].gate == "off" else rules[name].gate
        rules[name] = replace(rules[name], gate=gate, named=True)
        rules[name] = replace(rules[name], **kept)
    return Policy(rules, tuple(written.allow), written.alpha, source)  # type: ignore[attr-defined]


def _fraction(value: Any) -> Any:
    """0.02 of "2%"; anything else unchanged.

    Raises:
        ValueError: a bare number of 1 or more; whoever writes 3 means 3 %.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < math.inf:
        raise ValueError(f"expected {value:g}% or {value / 100:g}, found {value:g}")
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip().removesuffix("%")) / 100
        except ValueError:
            return value
    return value


class _RuleSection(_Section):
    gate: Requirement = "required"
    tolerance: Annotated[float, BeforeValidator(_fraction), Field(ge=0, le=10)] = 0.0
    direction: Direction = "both"
    improve: Annotated[float, BeforeValidator(_fraction), Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _one_aim(self) -> Self:
        if self.improve and {"tolerance", "direction"} & self.model_fields_set:
            raise ValueError("improve stands in the place of tolerance and direction; remove them")
        return self


class _CurveSection(_RuleSection):
    direction: Literal["both"] = "both"
    improve: Literal[0] = 0
    mode: LossMode = "spread"

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.mode == "bitwise" and self.tolerance:
            raise ValueError("bitwise has no tolerance; remove one of mode and tolerance")
        return self


class _CountSection(_Section):
    """No tolerance: a rise that is wanted stands under `allow`, by name."""

    gate: Requirement = "required"


_SECTIONS: dict[str, type[_Section]] = {"curve": _CurveSection, "count": _CountSection}


def _section(metric: Metric) -> type[_Section]:
    return _SECTIONS.get(metric.judge or "", _RuleSection)


def _file_model() -> type[BaseModel]:
    """The shape of a policy file: one section for every metric that can be judged."""
    sections: dict[str, Any] = {
        name: (_section(metric), _section(metric)()) for name, metric in judged_metrics().items()
    }
    metrics = create_model("_Metrics", __base__=_Section, **sections)
    alpha = Annotated[float, BeforeValidator(_fraction), Field(ge=LEAST_ALPHA, le=0.5)]
    return create_model(
        "_PolicyFile",
        __base__=_Section,
        alpha=(alpha, DEFAULT_ALPHA),
        metrics=(metrics, metrics()),
        allow=(list[AllowedRise], []),
    )


def _message(error: ErrorDetails) -> str:
    """What is wrong, what was expected, what was found."""
    where, given = error["loc"], error["input"]
    key = where[-1] if where else ""
    most = {"alpha": 0.5, "improve": 0.99}.get(str(key), 10)
    text = (
        f"{key}: expected a percentage such as 2% or a fraction such as 0.02, from 0 to"
        f" {100 * most:g}%, found {given!r}"
    )
    match error["type"]:
        case "extra_forbidden" if key == "tolerance":
            text = (
                f"{where[-2]}: counts have no tolerance; name what may rise under `allow`, as "
                "{operation: aten.copy_ float32, count: 4, reason: why}"
            )
        case _ if where[:1] == ("allow",):
            text = (
                "allow: expected a list of {operation: NAME, count: N, reason: WHY} and perhaps "
                f"bytes: N, found {given!r}"
            )
        case "extra_forbidden":
            text = f"unknown key {key!r}; expected {', '.join(_known(where[:-1]))}"
            text += removed(str(key))
        case "value_error":
            text = f"{key}: {error['ctx']['error']}"
        case "literal_error" if where[1] in CURVES and key == "direction":
            text = f"{where[1]}: a curve that moves is a change either way"
        case "literal_error":
            expected = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            text = f"{key}: expected one of {expected}, found {given!r}"
        case "model_type" if key == "metrics":
            text = "expected metrics with their rules, as `step_time: {...}`"
        case "model_type":
            text = f"{key}: expected a mapping such as {{tolerance: 2%}}"
        case "greater_than_equal" if key == "alpha":
            text = f"alpha must be above 0, at least {LEAST_ALPHA:g}: nothing is ever certain"
    return text


def _known(where: KeyPath) -> list[str]:
    if not where:
        return ["alpha", "metrics", "allow"]
    if where == ("metrics",):
        return list(judged_metrics())
    return list(_section(judged_metrics()[str(where[-1])]).model_fields)
