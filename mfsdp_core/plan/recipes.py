"""Recipes of quantised weights, as sizes: what each sends when weights are gathered. Pure.

    recipe    bits   one scale per       codes travel for             scales on the wire
    delayed   8      tensor              both passes                  none
    current   8      tensor              both passes                  none
    block     8      128 x 128           both passes                  none
    mxfp8     8      1 x 32 of rows,     forward,                     a byte per block of a row,
                     32 x 1 of columns   backward (as many again)     none

Scales that do not travel are known to every rank, which takes part in a maximum over the ranks.
`mfsdp_core.precision.float8_reference` runs them.

Sources: Transformer Engine's documentation of its recipes; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

from mfsdp_core.errors import ConfigurationError, refuse_configuration
from mfsdp_core.plan.layout import Layout, Shape
from mfsdp_core.plan.payload import BOTH, Payload
from mfsdp_core.plan.prefetch import Direction

Recipe = Literal["delayed", "current", "block", "mxfp8"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)

#: What travels: the codes of the recipe, or weights in the compute dtype, quantised on arrival.
GatherPrecision = Literal["recipe", "compute"]

#: The payload of `gathers="compute"`.
VALUES = "values"


@dataclass(frozen=True)
class Codes:
    """One array of codes. block: rows and columns under one scale, None for all of them.

    scales: the payload that carries its scales, a byte each; None where every rank knows them.
    """

    payload: str
    block: tuple[int | None, int | None]
    scales: str | None = None
    directions: frozenset[Direction] = BOTH


CODES: Mapping[Recipe, tuple[Codes, ...]] = {
    "delayed": (Codes("codes", (None, None)),),
    "current": (Codes("codes", (None, None)),),
    "block": (Codes("codes", (128, 128)),),
    "mxfp8": (
        Codes("row_codes", (1, 32), "row_scales", frozenset({"forward"})),
        Codes("column_codes", (32, 1), None, frozenset({"backward"})),
    ),
}


@dataclass(frozen=True)
class QuantisedWeights:
    """A `PayloadPlan`: matrices are quantised by a recipe, vectors travel as they are.

    gathers: `compute` sends weights in the compute dtype, and quantises what has arrived, with the
    scales of the recipe: the same weights at other bytes. Both passes then read the same.

    Raises:
        ConfigurationError: an unknown name, or `compute` where passes read different codes.
    """

    recipe: Recipe
    gathers: GatherPrecision = "recipe"

    def __post_init__(self) -> None:
        """Check the names."""
        for name, choices in (("recipe", RECIPES), ("gathers", get_args(GatherPrecision))):
            given = getattr(self, name)
            what = f"{name}={given!r}: expected one of {', '.join(choices)}."
            refuse_configuration([(given not in choices, what)])
        if self.gathers == "compute" and self.has_two_directions:
            raise ConfigurationError(
                f"recipe={self.recipe!r} with gathers='compute': rows and columns decode to "
                "different values, and weights that arrive as such are decoded once for both "
                "passes. Leave gathers at 'recipe'."
            )

    @property
    def has_two_directions(self) -> bool:
        """Whether forward and backward passes read different codes."""
        return any(codes.directions != BOTH for codes in CODES[self.recipe])

    def takes(self, name: str, shape: Shape) -> bool:
        """Matrices, and what has more dimensions."""
        del name
        return len(shape) > 1 and prod(shape) > 0

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        """The codes of each direction, and the scales that travel; or the weights."""
        if self.gathers == "compute":
            return (Payload(VALUES, compute, layout.slice_elements),)
        payloads = []
        for codes in CODES[self.recipe]:
            sizes = {codes.payload: layout.slice_elements}
            if codes.scales is not None:
                sizes[codes.scales] = most_in_a_slice(layout, codes.block[1] or 1)
            payloads += [Payload(n, "uint8", size, codes.directions) for n, size in sizes.items()]
        return tuple(payloads)


@lru_cache(maxsize=1024)
def most_in_a_slice(layout: Layout, together: int) -> int:
    """Bytes in the slice that needs most, at a byte per `together` elements of a row."""
    return max(
        sum(
            rows.rows * -(-rows.columns // together)
            for rows in layout.all_in(range(number, number + 1))
        )
        for number in range(layout.slices)
    )


#: Formats whose weights have a row-wise payload, for forward passes, and a column-wise one, for
#: backward passes, which cannot be derived from each other.
TWO_PAYLOADS = frozenset(name for name in RECIPES if QuantisedWeights(name).has_two_directions)


def gathers_by_module(weights: str, *, recomputes: bool) -> bool:
    """Whether to gather by module where nobody has said, by the format of weights; a heuristic.

    MXFP8 weights under activation recomputation need both payloads during the backward pass, and
    each module only for a moment; everything else is gathered once per pass, and earlier by unit.
    Source: the discussion of Megatron-LM PR #4181.
    """
    return weights in TWO_PAYLOADS and recomputes
