"""What travels when weights are gathered: the payloads of a codec, as sizes. Pure.

Weights that travel as they are have one payload, the weights themselves. Encoded weights have one
per array: codes of the rows, codes of the columns, scales. Every payload is a flat buffer over the
slices of its bucket's layout, of equal size per slice, so that it is cut and gathered like weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from mfsdp_core.plan.layout import Layout, Shape
from mfsdp_core.plan.prefetch import Direction

BOTH: frozenset[Direction] = frozenset(get_args(Direction))

#: The payload that needs no decoding: modules compute with what was gathered.
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Payload:
    """One array of encoded weights.

    dtype: torch's name, of the array and on the wire. slice_elements: in one slice of the bucket's
    layout. directions: the passes that gather it; activations that are recomputed read what a
    forward pass reads. lifetime: `gather` frees it once it is decoded, `use` keeps it with the
    weights, for modules that compute with it. Its tensor is another one at the next gather only
    where a pool has given the unit another slot.
    """

    name: str
    dtype: str
    slice_elements: int
    directions: frozenset[Direction] = BOTH
    lifetime: Literal["gather", "use"] = "gather"


class PayloadPlan(Protocol):
    """What planning has to know of a codec; `mfsdp_core.precision.codec` has the rest."""

    def takes(self, name: str, shape: Shape) -> bool:
        """Whether the codec encodes this parameter. The others travel as they are.

        name: the first of its qualified names. shape: of what this rank holds before sharding.
        """

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        """What travels for a bucket, in the order in which it is gathered.

        compute: torch's name of the dtype in which modules compute.
        """
