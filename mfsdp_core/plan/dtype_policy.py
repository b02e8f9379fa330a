"""Which dtype each role of a bucket has. Pure: dtypes are any hashable names.

role          meaning
compute       dtype of the module's parameter, in which forward and backward run
main_params   dtype of the weights that the optimizer updates
main_grads    dtype in which gradients are accumulated and handed over
grad_comm     dtype on the wire
reduce        dtype in which the values of all ranks are added up
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Floating-point dtypes of weights and gradients, by torch's names.
FLOATING = ("float64", "float32", "bfloat16", "float16")
#: Bytes of one element of what a buffer may hold; codes and scales of encoded weights are bytes.
ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint8": 1,
}
_BITS = {
    **{name: 8 * ELEMENT_BYTES[name] for name in FLOATING},
    "fp64": 64,
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "complex128": 128,
    "complex64": 64,
}


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
    bits, others = (_BITS.get(str(dtype).removeprefix("torch."), 0) for dtype in (one, other))
    return bits > others
