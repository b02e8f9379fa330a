"""The parameters of one bucket: what modules and users see of them, and their hooks.

A physical parameter has two faces. `raw` is the original `nn.Parameter`, its data a view of the
full compute buffer: modules see it while their unit runs. `sharded` is a DTensor over this rank's
main weights: modules, optimizers and state dicts see it at all other times. A tied parameter has
one raw and one sharded face under several names; a swap rebinds all of them.

[Note: hooks of parameters] Autograd knows the raw parameters, so it never calls a hook that was
registered on a sharded one. Its gradient is the shard of the mean over all ranks, complete at the
end of a cycle: that is what a hook of one process over the whole batch would see, if the cycle is
one backward pass. `register_hook` is meant for the gradient of every single pass; where several
have been summed up it is refused. `register_post_accumulate_grad_hook` is meant for the sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.comm.uneven import largest_over_ranks
from mfsdp_core.errors import LifecycleError
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.shard.chunk import Offsets
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.shard.sharded_weight import ShardedWeight, described
from mfsdp_core.shard.tensor_parallel import TensorPart, local_data, move_to

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ManagedParameter:
    """One physical parameter.

    holders: every (module, attribute) that refers to it. part: what tensor parallelism leaves of
    it to this rank; layouts and shards are of that. offsets: where this rank's shard, which has
    the shape of `sharded.to_local()`, begins in the whole parameter; set with `sharded`.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[nn.Module, str], ...]
    raw: nn.Parameter
    part: TensorPart
    sharded: nn.Parameter = field(init=False)
    original_id: int = field(init=False)
    offsets: Offsets = field(init=False)
    _local: torch.Tensor = field(init=False)
    _version: int = field(init=False)
    _raw_version: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember the parameter that was given to sharding; `raw` may stand in for it later."""
        self.original_id = id(self.raw)

    def watch(self) -> None:
        """From now on, know what the user does to `sharded`."""
        self._local = self.weight._local_tensor
        self._version = self.weight._version + self._local._version
        self._raw_version = self.raw._version

    def look(self) -> bool:
        """Whether the weight was changed since the last look, and may have been.

        Raises:
            LifecycleError: it was frozen or thawed, which buffers cannot follow (without gradients
                nobody asks), changed where the change is lost, or exchanged.
        """
        if self.sharded.requires_grad != self.raw.requires_grad and torch.is_grad_enabled():
            raise LifecycleError(
                f"requires_grad of {self.names[0]} became {self.sharded.requires_grad} after "
                "sharding. Freeze or unfreeze parameters before fully_shard_model. To train in "
                "stages, shard with all trainable that ever will be, and give each stage an "
                "optimizer over its own parameters. Under torch.no_grad() it may change for a "
                "while, as with a disabled adapter."
            )
        if self.raw._version != self._raw_version:
            self._raw_version = self.raw._version
            raise LifecycleError(
                f"{self.names[0]} was changed in place while its module ran. There it is a copy "
                "for computing, and the change is lost. Change it outside of the forward pass."
            )
        weight = self.weight
        if weight._local_tensor is not self._local:
            raise LifecycleError(
                "a sharded parameter has become another tensor, cut from its buffers: expected "
                f"{self._local.dtype} on {self._local.device}, found {described(weight)}. Cast or "
                "move a module before it is sharded."
            )
        before, self._version = self._version, weight._version + self._local._version
        return before != self._version

    @property
    def weight(self) -> ShardedWeight:
        """`sharded`, by its class."""
        return cast(ShardedWeight, self.sharded)

    @property
    def was_changed(self) -> bool:
        """Whether the weight was changed in place since the last look."""
        return self._version != self.weight._version + self._local._version

    def refuse(self, held: object) -> None:
        """Refuse what was put in the place of this one, with a LifecycleError."""
        raise LifecycleError(
            f"{self.names[0]}: expected the sharded parameter, found "
            f"{'nothing' if held is None else type(held).__name__} in its place, assigned after "
            "sharding or by torch.func.functional_call. It would take no part: copy values into "
            "the parameter in place, or by load_state_dict(), or assign before fully_shard_model."
        )

    def show_raw(self) -> None:
        """Let modules see the compute weight."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.raw

    def show_sharded(self) -> None:
        """Let modules see the shard of the main weight."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.sharded


def move_parameters(parameters: list[ManagedParameter], full: DBuffer | None) -> None:
    """Make the raw parameters of a bucket views of `full`; None: of one element, in their shape."""
    nothing = local_data(parameters[0].raw).new_empty(())
    for index, managed in enumerate(parameters):
        shape = managed.part.shape
        move_to(managed.raw, nothing.expand(shape) if full is None else full.tensor(index))


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has registered any."""
    hooked: Any = parameter
    return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)


def run_hooks(parameter: nn.Parameter, gradient: DTensor, name: str, *, once: bool) -> None:
    """Run them on `gradient`, which is attached already; its values take those of the results.

    once: it holds one backward pass, and nobody has seen it yet.

    Raises:
        LifecycleError: a hook for single passes where several have been summed up, or one that
            returned something else than a gradient of the same shards.
    """
    hooked: Any = parameter
    hooks = tuple((hooked._backward_hooks or {}).values())
    if hooks and not once:
        raise LifecycleError(
            f"register_hook on {name} is for the gradient of one backward pass, and this cycle has "
            "summed up several. Use register_post_accumulate_grad_hook, which gets the parameter "
            "with the sum in .grad, or call zero_grad() after every backward pass."
        )
    for hook in hooks:
        result = hook(gradient)
        if result is None or result is gradient:
            continue
        fits = isinstance(result, DTensor) and result.placements == gradient.placements
        if not fits or result.shape != gradient.shape:
            raise LifecycleError(
                f"a hook on {name} returned a {type(result).__name__}; expected None or a DTensor "
                f"of shape {tuple(gradient.shape)}, placed {gradient.placements} as its argument. "
                "Compute it from the argument."
            )
        local_tensor(gradient).copy_(local_tensor(result))
    with torch.no_grad():
        for hook in tuple((hooked._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


def warn_of_unequal(parameters: Iterable[ManagedParameter], axes: DataParallelAxes) -> None:
    """Warn on every rank if some parameter has other values on another one. Collective.

    A sharded weight takes each row from the rank that owns it, so unequal weights become a mixture
    that no rank had; whole ones stay unequal. One reduction of two integers per parameter finds
    out.

    Parameters on the meta device, expanded ones, and those that are no plain tensors are not looked
    at.
    """
    looked_at = [p for p in parameters if type(local_tensor(p.raw).data) is torch.Tensor]
    looked_at = [
        p for p in looked_at if not p.raw.is_meta and 0 not in local_tensor(p.raw).stride()
    ]
    if not looked_at:
        return
    sums = torch.tensor([_sum_of_bits(local_tensor(p.raw).data) for p in looked_at])
    both = torch.cat([sums, -sums]).to(looked_at[0].raw.device)
    for axis in range(axes.mesh.ndim):
        both = largest_over_ranks(both, axes.mesh.get_group(axis))
    largest, smallest = both.view(2, -1)
    unequal = torch.nonzero(largest != -smallest).flatten().tolist()
    if unequal:
        warnings.warn(
            f"{len(unequal)} of {len(looked_at)} parameters have other values on other ranks (the "
            f"first is {looked_at[unequal[0]].names[0]}). Training would begin with a mixture, "
            "unless a checkpoint is loaded now: seed all ranks alike before the model is built. "
            "broadcast_params() mends it where ranks hold whole weights (no_shard).",
            UserWarning,
            stacklevel=5,
        )


def _sum_of_bits(values: torch.Tensor) -> int:
    """Of the elements' bits as integers: equal for equal tensors."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
