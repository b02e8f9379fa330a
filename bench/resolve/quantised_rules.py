"""Rules about number formats: dtypes, weights that travel as codes, layers that multiply FP8.

A dtype policy that an engine cannot follow exactly is pruned, not approximated.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final

from bench.resolve.engine_choice import adds_up_as_sent, codec_of, core_settings
from bench.resolve.import_path import locate
from bench.resolve.machine import Machine
from bench.spec import (
    DtypePolicies,
    EngineSpec,
    LinearLayers,
    MegatronFsdpSettings,
    ModelSpec,
    ResolvedDtypes,
    ResolvedRun,
)
from mfsdp_core.plan.dtype_policy import is_wider
from mfsdp_core.plan.recipes import TWO_PAYLOADS

#: The recipes of each package; the first is the default.
RECIPES: Final = {
    "torch": ("",),
    "transformer_engine": ("current", "delayed", "block", "mxfp8", "nvfp4"),
}
#: What Transformer Engine says about a recipe.
_CHECKS: Final = {
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
#: The compute capability from which Transformer Engine has a recipe (its documentation, FP8 and FP4
#: recipes), for devices that are not here.
_CAPABILITY: Final = {"block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
_FP8_CAPABILITY = (8, 9)
_FACTOR = 16


def resolve_linear(model: ModelSpec) -> LinearLayers:
    """The layers that are wanted, with the package's first recipe where none is named."""
    recipe = model.linear_recipe or RECIPES[model.linear][0]
    return LinearLayers(kind=model.linear, recipe=recipe, quantised_weights=model.quantised_weights)


def recipes(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """Codes that would not be used, or that both passes cannot use."""
    settings, codec, linear = core_settings(run.engine), codec_of(run.engine), run.linear
    if settings is None:
        return
    compute = settings.gather_precision == "compute"
    if compute and settings.recipe == "none":
        yield (
            "gather-precision-without-recipe",
            "gather_precision compute is what recipe none does: leave it at recipe",
        )
    elif compute and codec is not None and codec.has_two_directions:
        yield (
            "gather-precision-without-recipe",
            f"the recipe {settings.recipe} has other codes for forward and backward passes, which"
            " weights gathered in the compute dtype cannot serve both: set gather_precision to"
            " recipe",
        )
    recipe: str = codec.recipe if codec is not None else ""
    if linear.kind == "transformer_engine" and linear.quantised_weights:
        recipe = linear.recipe
    inside = run.recompute != "none" and not settings.fine_grained_gather
    if inside and recipe in TWO_PAYLOADS:
        yield (
            "recompute-inside-of-a-unit",
            f"recompute {run.recompute} repeats what is inside of a layer, and the recipe"
            f" {recipe} has other codes for that than for the backward pass: set"
            " engine.fine_grained_gather to true",
        )


def layers(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """Linear layers of Transformer Engine: what they know, need and multiply."""
    if reason := _no_such_recipe(run.linear):
        yield "linear-has-no-such-recipe", reason
    if run.linear.kind == "torch":
        return
    if reason := _beside_the_engine(run):
        yield "linear-beside-the-engine", reason
    shape = run.shape
    if shape is not None and run.launch.device != "cpu":
        sizes = {
            "hidden": shape.hidden,
            "ffn_hidden": shape.ffn_hidden,
            "kv_heads x head_dim": shape.kv_heads * shape.head_dim,
        }
        odd = [f"{name} {size}" for name, size in sizes.items() if size % _FACTOR]
        if odd:
            yield (
                "linear-sizes-divide",
                f"FP8 products need multiples of {_FACTOR}; found {', '.join(odd)}",
            )
    if reason := _layers_not_here(run, machine):
        yield "linear-not-here", reason


def _no_such_recipe(linear: LinearLayers) -> str | None:
    """A recipe, or quantised weights, that the package does not know."""
    offered = RECIPES[linear.kind]
    if linear.recipe not in offered:
        known = " and ".join(offered) if offered[0] else "none"
        return f"linear layers of {linear.kind} know the recipes {known}, not {linear.recipe}"
    if not linear.quantised_weights:
        return None
    if linear.kind == "torch":
        return "quantised_weights are kept by layers of transformer_engine: set linear"
    if linear.recipe == "nvfp4":
        return "weights that are kept as nvfp4 are not built: set quantised_weights to false"
    return None


def _beside_the_engine(run: ResolvedRun) -> str | None:
    """What the layers need of model, engine and parallelism."""
    linear, engine = run.linear, run.engine
    if run.shape is None or run.shape.hybrid is not None or run.shape.qkv_bias:
        described = "one with biases" if run.shape and run.shape.qkv_bias else "another model"
        return f"layers of {linear.kind} are exchanged in a Llama without biases; found {described}"
    if engine.tensor_parallel > 1:
        return f"layers of {linear.kind} are not cut: set engine.tensor_parallel to 1"
    core = core_settings(engine)
    if not linear.quantised_weights:
        return None
    if core is None and not isinstance(engine.settings, MegatronFsdpSettings):
        return (
            f"engine {engine.name} gathers no codes of {linear.kind}: set quantised_weights to"
            " false"
        )
    if core is not None and core.recipe != "none":
        return (
            f"recipe {core.recipe} would encode weights that {linear.kind} keeps as codes: set"
            " one of recipe and quantised_weights back"
        )
    return None


def _layers_not_here(run: ResolvedRun, machine: Machine) -> str | None:
    """The package must be installed, and a device must have what it needs, in its own words."""
    linear = run.linear
    if machine.described:
        return _needs_capability(linear, machine)
    if locate("transformer_engine") is None:
        return "Transformer Engine is not installed here: pip install 'mfsdp-bench[gpu]'"
    if run.launch.device != "cuda":
        return f"Transformer Engine computes on CUDA; found device {run.launch.device}"
    reason = _reason(_CHECKS.get(linear.recipe, "is_fp8_available"))
    return None if reason is None else f"Transformer Engine, of {linear.recipe}: {reason}"


def _needs_capability(linear: LinearLayers, machine: Machine) -> str | None:
    needed = _CAPABILITY.get(linear.recipe, _FP8_CAPABILITY)
    for device in machine.cuda_devices[:1]:
        if device.capability is not None and device.capability < needed:
            return (
                f"Transformer Engine has the recipe {linear.recipe} from compute capability"
                f" {needed[0]}.{needed[1]}; {device.name} has"
                f" {device.capability[0]}.{device.capability[1]}"
            )
    return None


@lru_cache(maxsize=8)
def _reason(check: str) -> str | None:
    """Why the installed Transformer Engine cannot, None where it can.

    Found in a process of its own, since it loads torch and looks at the device.
    """
    program = (
        f"from transformer_engine.pytorch import {check} as check\n"
        "able, reason = check(return_reason=True)\n"
        "print('' if able else reason or 'it gives no reason')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ends without a word"])[-1]
    return done.stdout.strip().rpartition("\n")[2] or None


def dtypes(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """The first dtype that the engine cannot match, with what it would need to be."""
    for mismatch in islice(_mismatches(run, run.engine.known_row.dtypes), 1):
        yield "dtypes-not-in-engine", mismatch


def _mismatches(run: ResolvedRun, offered: DtypePolicies) -> Iterator[str]:
    name, dtypes = run.engine.known_row.name, run.dtypes
    main = dtypes.main_params or dtypes.compute
    if offered.main is not None and main not in offered.main:
        yield (
            f"engine {name} is matched on FP32 main weights; found"
            f" main_params {dtypes.main_params or 'none'} with compute {dtypes.compute}: set"
            f" dtypes.main_params to {offered.main[0]}"
        )
    if offered.gradients_as_main and dtypes.main_grads != main:
        yield (
            f"engine {name} keeps gradients in the dtype of its main weights, {main}; found"
            f" {_origin(dtypes, 'main_grads', 'compute')}: set dtypes.main_grads to {main}"
        )
    autocast = offered.autocast
    reached = main == "fp32" and dtypes.compute in (autocast or ())
    if autocast is not None and dtypes.compute != main and not reached:
        yield (
            f"engine {name} computes in another dtype by autocast, which goes from fp32 to"
            f" {' or '.join(autocast)}; found compute {dtypes.compute} on {main} weights"
        )
    if offered.wire == () and dtypes.grad_comm != dtypes.main_grads:
        yield (
            f"engine {name} communicates nothing and cannot round gradients to"
            f" {dtypes.grad_comm}: set dtypes.grad_comm to {dtypes.main_grads} in its cells"
        )
    if offered.wire and dtypes.grad_comm not in {main, *offered.wire}:
        yield (
            f"engine {name} sends gradients as {main}, or as {' or '.join(offered.wire)} by a"
            f" communication hook; found {_origin(dtypes, 'grad_comm', 'main_grads')}"
        )
    if offered.sends_as_computed and dtypes.grad_comm != dtypes.compute:
        yield (
            f"engine {name} sends gradients in the dtype it computes in, {dtypes.compute}; found"
            f" {_origin(dtypes, 'grad_comm', 'main_grads')}: set dtypes.grad_comm to"
            f" {dtypes.compute}"
        )
    yield from _sums_elsewhere(run.engine, dtypes)


def _origin(dtypes: ResolvedDtypes, name: str, source: str) -> str:
    """A dtype and its value, and of which it takes its own where a spec leaves it open."""
    value = getattr(dtypes, name)
    left_open = f" (left open, it is that of {source})" * (value == getattr(dtypes, source))
    return f"{name} {value}{left_open}"


def _sums_elsewhere(engine: EngineSpec, dtypes: ResolvedDtypes) -> Iterator[str]:
    """What cannot add up as wanted, and the setting that can."""
    wire, total = dtypes.grad_comm, dtypes.reduce
    if total in (None, wire):
        return
    change = f"found reduce {total}: set dtypes.reduce to {wire}"
    if not is_wider(total, wire):
        yield f"sums over ranks hold at least what is sent, {wire}; {change}"
    elif adds_up_as_sent(engine):
        row = engine.known_row
        by = "with nccl_ub or cuda_graph " if row.dtypes.sums else ""
        yield f"engine {row.name} {by}adds up in the dtype of the wire, {wire}; {change}"
    elif engine.setting("transport") == "native":
        yield (
            f"transport native adds up in the dtype of the wire, {wire}; {change}, or"
            " engine.transport to auto, which adds up in any"
        )
