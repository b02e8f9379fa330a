"""Which trainable parameters got a gradient in a cycle, on any rank.

[Note: unused parameters] Plain torch leaves `.grad` of a parameter None that no backward pass has
reached, and optimizers leave such a parameter alone. A rank does not know what the others used, so
all of them reduce one byte per parameter at the end of a cycle, while gradients are on their way.
A rank that used every parameter itself has nothing to learn, and does not read the result: a model
that leaves nothing out never waits for it. Another one reads once, behind its last reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from mfsdp_core.comm.any_rank import AnyRank


class Usage:
    """Of the parameters that one set of ranks shares: the dense ones, or the experts'.

    parameters: ids of their raw faces, in the same order on all ranks.
    """

    def __init__(self, parameters: list[int], flags: AnyRank) -> None:
        self._parameters = parameters
        self._flags = flags
        self._complete = True

    def ask(self, used: set[int]) -> None:
        """Start to find out what all ranks together have used. Collective."""
        unset = [index for index, one in enumerate(self._parameters) if one not in used]
        self._complete = not unset
        self._flags.ask(unset)


def unused_by_all(usages: Sequence[Usage]) -> set[int]:
    """The parameters that no rank has used, by one read for all of `usages`, or none."""
    asked = [usage for usage in usages if not usage._complete]
    if not asked:
        return set()
    parameters = chain.from_iterable(usage._parameters for usage in asked)
    bits = torch.cat([usage._flags.bits() for usage in asked]).tolist()
    return {parameter for parameter, bit in zip(parameters, bits, strict=True) if not bit}
