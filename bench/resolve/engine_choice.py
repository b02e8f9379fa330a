"""The engine of a run: the choices that a spec leaves open, and what rules and plans read of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from bench.spec import (
    EngineSpec,
    MegatronFsdpSettings,
    MegatronSwitches,
    MfsdpSettings,
    RunSpec,
)
from mfsdp_core.plan.recipes import QuantisedWeights, gathers_by_module

#: Optimizers with moments of a dtype of their own, which read decoupled gradients.
PRECISION_AWARE: Final = ("precision_aware_adamw", "fused_adam")


def core_settings(engine: EngineSpec) -> MfsdpSettings | None:
    """The settings of `engine` where it is this project's own; None for any other."""
    # Not a subclass: an engine given by its import path has the same switches, but other rules.
    return engine.settings if type(engine.settings) is MfsdpSettings else None


def core_switches(engine: EngineSpec) -> MfsdpSettings:
    """As `core_settings`; for any other engine the defaults, which ask for nothing."""
    return core_settings(engine) or MfsdpSettings()


def megatron_switches(engine: EngineSpec) -> MegatronSwitches:
    """The settings of the core or of megatron-fsdp; for any other engine their defaults."""
    is_megatron = type(engine.settings) is MegatronFsdpSettings
    return engine.settings_as(MegatronFsdpSettings) if is_megatron else core_switches(engine)


def changed_settings(given: Any, defaults: Any, *names: str) -> list[str]:
    """Those of `names` that differ from their defaults, as `nvls=on`."""
    pairs = ((name, getattr(given, name)) for name in names)
    return [f"{name}={value}" for name, value in pairs if value != getattr(defaults, name)]


def codec_of(engine: EngineSpec) -> QuantisedWeights | None:
    """How the core's weights are quantised on their way; None where they are not."""
    settings = core_switches(engine)
    if settings.recipe == "none":
        return None
    codec = QuantisedWeights(settings.recipe)
    # With two directions there is one way; the rule gather-precision-without-recipe says so.
    return codec if codec.has_two_directions else replace(codec, gathers=settings.gather_precision)


def adds_up_as_sent(engine: EngineSpec) -> bool:
    """Whether sums over ranks are in the dtype of the wire, unless another one is named."""
    registers = engine.setting("nccl_ub") or engine.setting("cuda_graph")
    return not engine.known_row.dtypes.sums or bool(registers)


def resolve_engine(spec: RunSpec) -> EngineSpec:
    """The engine with its strategy and its way of gathering chosen.

    Raises:
        ConfigError: no engine has this name.
    """
    strategy = spec.engine.strategy or spec.engine.known_row.strategies[0]
    engine = spec.engine.model_copy(update={"strategy": strategy})
    settings = core_settings(engine)
    if settings is None or settings.fine_grained_gather is not None:
        return engine
    model = spec.model
    weights: str = settings.recipe
    if model.linear == "transformer_engine" and model.quantised_weights and model.linear_recipe:
        weights = model.linear_recipe
    by_module = gathers_by_module(weights, recomputes=model.recompute != "none")
    return engine.with_settings(fine_grained_gather=by_module)
