"""When to gather by module rather than by unit, where nobody has said."""

from __future__ import annotations

from mfsdp_core.plan.recipes import RECIPES, QuantisedWeights

#: Formats whose weights have a row-wise payload, for forward passes, and a column-wise one, for
#: backward passes, which cannot be derived from each other.
TWO_PAYLOADS = frozenset(name for name in RECIPES if QuantisedWeights(name).has_two_directions)


def gathers_by_module(weights: str, *, recomputes: bool) -> bool:
    """The default of `enable_fine_grained_param_gather` for a format of weights; a heuristic.

    MXFP8 weights under activation recomputation need both payloads during the backward pass, and
    each module only for a moment; everything else is gathered once per pass, and earlier by unit.
    Source: the discussion of Megatron-LM PR #4181. An explicit setting overrides it.
    """
    return weights in TWO_PAYLOADS and recomputes
