"""Which dtype each role of a bucket has. Pure: dtypes are any hashable names.

role          meaning
compute       dtype of the module's parameter, in which forward and backward run
main_params   dtype of the weights that the optimizer updates
main_grads    dtype in which gradients are accumulated and handed over
grad_comm     dtype on the wire
reduce        dtype in which the values of all ranks are added up
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Floating-point dtypes of weights and gradients, by torch's names.
FLOATING = ("float64", "float32", "bfloat16", "float16")
_OF_REAL = re.compile(r"(?:b?float|b?fp?|complex)(16|32|64|128)$")


def element_bytes(dtype: str) -> int:
    """Bytes of one element, by torch's name, as `float8_e4m3fn`."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) // 8 if bits else 1  # bool


@dataclass(frozen=True)
class GroupDtypes(Generic[Name]):
    """Resolved dtypes of one bucket; nothing is left open."""

    compute: Name
    main_params: Name
    main_grads: Name
    grad_comm: Name
    reduce: Name

    @property
    def shares_weights(self) -> bool:
        """Whether main and compute weights are one copy."""
        return self.main_params == self.compute

    @property
    def needs_comm_buffer(self) -> bool:
        """Whether gradients change dtype on their way to the wire."""
        return self.main_grads != self.grad_comm

    @property
    def widens_sums(self) -> bool:
        """Whether gradients are added up in another dtype than they travel in."""
        return self.reduce != self.grad_comm

    @property
    def casts_gradient(self) -> bool:
        """Whether the optimizer must be handed a cast copy instead of a view."""
        return self.main_grads != self.main_params


def resolve_dtypes(
    compute: Name,
    main_params: Name | None,
    main_grads: Name | None,
    grad_comm: Name | None,
    reduce: Name | None = None,
    *,
    trainable: bool = True,
) -> GroupDtypes[Name]:
    """Fill in what the policy leaves open.

    A frozen bucket has neither main weights nor gradients of its own.

    `main_params` None: the compute weights are the main weights. `main_grads` None: the compute
    dtype. `grad_comm` None: the dtype of the main gradients. `reduce` None: that of the main
    gradients, or of the wire where that holds more.
    """
    if not trainable:
        main_params = main_grads = grad_comm = reduce = None
    grads = compute if main_grads is None else main_grads
    wire = grads if grad_comm is None else grad_comm
    if reduce is None:
        reduce = grads if is_wider(grads, wire) else wire
    return GroupDtypes(
        compute=compute,
        main_params=compute if main_params is None else main_params,
        main_grads=grads,
        grad_comm=wire,
        reduce=reduce,
    )


def is_wider(one: Hashable, other: Hashable) -> bool:
    """Whether a floating-point dtype holds more than another; of torch or a name of one."""
    found = (_OF_REAL.match(str(dtype).removeprefix("torch.")) for dtype in (one, other))
    bits, others = (0 if match is None else int(match[1]) for match in found)
    return bits > others
