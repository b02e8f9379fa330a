"""Rules about quantised weights, and the bytes that a plan predicts for their gathers."""

from __future__ import annotations

from collections import Counter

from bench.resolve.engine_rules import codec_of, core_settings
from bench.resolve.machine import Machine
from bench.resolve.parameter_facts import TORCH_NAMES
from bench.resolve.state_bytes import bucket_plans, counted_layers
from bench.spec import SHARDED, ModelShape, ResolvedRun
from mfsdp_core.plan.dtype_policy import ELEMENT_BYTES
from mfsdp_core.plan.recipes import TWO_PAYLOADS, QuantisedWeights


def gather_bytes(run: ResolvedRun) -> dict[str, int]:
    """Bytes of all weights as one gather for a forward pass has them, by torch's name of the dtype.

    Beside tensor or expert parallelism: of what one rank of such a group holds of them.

    Empty where nobody knows: the engine is not the core, the model is the user's own, or nothing is
    gathered. Every use of a unit gathers as much again, so gathers of a step are multiples of it.
    """
    if run.shape is None or core_settings(run.engine) is None or not SHARDED[run.strategy]:
        return {}
    if run.linear.quantised_weights:  # layers of others encode them
        return {}
    return counted_layers(run.shape, run.engine, lambda shape: _gather_bytes(run, shape))


def _gather_bytes(run: ResolvedRun, shape: ModelShape) -> dict[str, int]:
    codec = codec_of(run.engine)
    found: Counter[str] = Counter()
    for plan in bucket_plans(run, shape):
        if codec is None or not plan.is_encoded:
            compute = TORCH_NAMES[run.dtypes.compute]
            found[compute] += plan.layout.total_elements * ELEMENT_BYTES[compute]
            continue
        for payload in codec.payloads(plan.layout, plan.dtype):
            if "forward" in payload.directions:
                size = payload.slice_elements * ELEMENT_BYTES[payload.dtype]
                found[payload.dtype] += plan.layout.slices * size
    return dict(found)


def recipe_not_built(run: ResolvedRun, _machine: Machine) -> str | None:
    """A recipe that only plans."""
    codec = codec_of(run.engine)
    if codec is None or codec.recipe != "nvfp4":
        return None
    predicted = sum(gather_bytes(run).values())
    elements = 0 if run.shape is None else run.shape.parameters
    bytes_each = f", {predicted / elements:.2f} B per weight" if elements and predicted else ""
    return (
        "weights of the recipe nvfp4 need kernels of Transformer Engine for compute capability"
        f" 10.0, and plain torch has no 4-bit dtype: planned only (one gather: {predicted:,}"
        f" B{bytes_each})"
    )


def gather_precision_without_recipe(run: ResolvedRun, _machine: Machine) -> str | None:
    """Nothing is quantised, or in two ways at once."""
    settings = core_settings(run.engine)
    if settings is None or settings.gather_precision == "recipe":
        return None
    if settings.recipe == "none":
        return "gather_precision compute is what recipe none does: leave it at recipe"
    if QuantisedWeights(settings.recipe).has_two_directions:
        return (
            f"the recipe {settings.recipe} has other codes for forward and backward passes, which"
            " weights gathered in the compute dtype cannot serve both: set gather_precision to"
            " recipe"
        )
    return None


def recompute_inside_of_a_unit(run: ResolvedRun, _machine: Machine) -> str | None:
    """What is recomputed inside of a layer needs other codes than the backward pass around it."""
    settings, codec, linear = core_settings(run.engine), codec_of(run.engine), run.linear
    if settings is None or run.recompute == "none" or settings.fine_grained_gather:
        return None
    recipe: str = codec.recipe if codec is not None else ""
    if linear.kind == "transformer_engine" and linear.quantised_weights:
        recipe = linear.recipe
    if recipe not in TWO_PAYLOADS:
        return None
    return (
        f"recompute {run.recompute} repeats what is inside of a layer, and the recipe"
        f" {recipe} has other codes for that than for the backward pass: set"
        " engine.fine_grained_gather to true"
    )
