"""One bucket at run time: its parameters, the weights and gradients behind them, and the swap.

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

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.errors import LifecycleError
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.precision.transformer_engine import (
    has_drawn_values,
    initial_values,
    marks_of,
    take_drawn_values,
)
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.weight_buffers import WeightBuffers
from mfsdp_core.shard.chunk import Offsets, remember_offsets
from mfsdp_core.shard.dtensor import as_dtensor, dtensor_placements, local_tensor, name_tensor
from mfsdp_core.shard.sharded_weight import ShardedWeight, accessors, described, sharded_weight
from mfsdp_core.shard.tensor_parallel import TensorPart, local_data, move_to
from mfsdp_core.shard.uneven_shard import shard_like, with_cut

_OTHER_GRADIENT = (
    "{name} holds a gradient that is not the reduced one: assigned by hand, or of a loss that was "
    "computed from the sharded parameter outside of the model's forward. Further gradients cannot "
    "be added to it. Change gradients in place, call zero_grad() before the next backward pass, "
    "and compute penalties of weights in the forward of the module that holds them."
)


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

    def check_held(self) -> None:
        """Refuse a parameter that was put in the place of this one.

        Raises:
            LifecycleError: a holder has something else.
        """
        for module, attribute in self.holders:
            held = module._parameters.get(attribute)
            if held is not self.sharded:
                raise LifecycleError(
                    f"{self.names[0]}: expected the sharded parameter, found "
                    f"{'nothing' if held is None else type(held).__name__} in its place, assigned "
                    "after sharding or by torch.func.functional_call. It would take no part: copy "
                    "values into the parameter in place, or by load_state_dict(), or assign before "
                    "fully_shard_model."
                )

    def show_raw(self) -> None:
        """Let modules see the compute weight."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.raw

    def show_sharded(self) -> None:
        """Let modules see the shard of the main weight."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.sharded


_NOTHING = torch.empty(0)
_held = [torch.empty(0)]
#: References to what only a list holds; versions of Python count differently. Those of C++, as
#: autograd's, count as well (torch 2.11 and 2.13).
_ALONE = sys.getrefcount(_held[0])


def _gradient_of(managed: ManagedParameter, local: torch.Tensor) -> DTensor:
    shard: Any = managed.sharded
    gradient = shard_like(local, shard)
    name_tensor(gradient, f"gradient of {managed.names[0]}")
    return gradient


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


@dataclass(frozen=True)
class BucketFacts:
    """One flat buffer.

    name: as in events. unit: "" is the root. parameters: first name of each, in buffer order.
    elements: of the whole buffer, padding included.
    """

    name: str
    unit: str
    parameters: tuple[str, ...]
    elements: int
    trainable: bool


class Bucket:
    """A bucket of a unit."""

    def __init__(
        self,
        spec: BucketSpec,
        parameters: list[ManagedParameter],
        weights: WeightBuffers,
        gradients: GradientBuffers | None,
        *,
        axes: DataParallelAxes,
        allocators: Allocators,
    ) -> None:
        self.plan = spec.plan
        self.parameters = parameters
        self.dtypes = spec.dtypes
        self.weights = weights
        self.gradients = gradients
        self._shards_optimizer = spec.strategy.inner.shards_optimizer
        self._owned = spec.buffers.owned
        rows = (spec.layout.rows_in(index, self._owned) for index in range(len(parameters)))
        self._rows = list(rows)
        self._own_parts = list(map(self._own_part, range(len(parameters))))
        self._spec = spec
        self.axes = axes
        self._mesh = axes.whole
        # Gradients as the sharded parameters have them, and the memory that they are views of now.
        self._gradient_shards: list[DTensor | None] = [None] * len(parameters)
        self._viewed: torch.Tensor | None = None
        self._handed_over = 0  # version of a cast copy then
        self._attached: int | None = None
        self._once = True  # whether what is attached holds one pass, and nobody has seen it before
        # An optimizer that reads decoupled gradients takes them in whatever dtype they have.
        self._attribute = "decoupled_grad" if spec.decoupled else "grad"
        # What a parameter has there now, without reading what is unread; and how it gets another.
        self._held, self._put = accessors(self._attribute)
        self._cast = allocators.find(spec.buffers, "grad_cast")
        self._adopt()

    @property
    def is_trainable(self) -> bool:
        """Whether the bucket has gradients."""
        return self.gradients is not None

    def facts(self) -> BucketFacts:
        """What it holds."""
        return BucketFacts(
            self.plan.name,
            self.plan.unit,
            tuple(managed.names[0] for managed in self.parameters),
            self.plan.layout.total_elements,
            self.is_trainable,
        )

    def local_view(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """A parameter's part of `flat`: a slice's whole rows, perhaps none, or the whole tensor.

        `flat` has the extent of the main weights: one slice where the optimizer is sharded, else
        the full buffer.
        """
        shape, strides, start = self._own_parts[index]
        # One operation of torch where a slice and its shape are two.
        return flat.as_strided(shape, strides, flat.storage_offset() + start)

    def _own_part(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape, strides and first element of a parameter's part of the main weights."""
        slot = self.plan.layout.slots[index]
        if not self._shards_optimizer:
            return slot.shape, slot.strides, slot.offset
        local = self._rows[index]
        return (local.rows, *slot.shape[1:]), slot.strides or (1,), local.start

    def local_views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of all parameters."""
        return (self.local_view(index, flat) for index in range(len(self.parameters)))

    def load(self, index: int, value: torch.Tensor) -> None:
        """Write a tensor into this rank's main weights; `install` must follow.

        value: the whole parameter, over the tensor-parallel axis as well.
        """
        self.load_part(index, self.parameters[index].part.of(value))

    def load_part(self, index: int, value: torch.Tensor) -> None:
        """Like `load`, of what tensor parallelism leaves to this rank."""
        local = self.local_view(index, self.weights.main)
        if self._shards_optimizer:
            rows = self._rows[index]
            shape = self.plan.layout.slots[index].shape or (1,)
            value = value.reshape(shape)[rows.first_row : rows.first_row + rows.rows]
        local.copy_(value)

    def attach_gradients(self, unset: set[int], read: Callable[[], None], *, passes: int) -> bool:
        """Set `.grad` of the sharded parameters, or `.decoupled_grad` where those are requested.

        A view of the reduced gradient where its dtype is that of the main weights, or decoupled;
        else a cast copy that lives until `zero_grad`. What has been attached is left alone until
        another reduction lands: the caller may have clipped, unscaled or removed it. Hooks of the
        sharded parameters run on what they are handed.

        unset: parameters, by id of raw, that this rank has not used; `read` attaches the gradients
        of those that another rank has, once somebody reads them. passes: of the cycle, whose
        gradients are summed up in this one. Returns whether there was a new one.

        Raises:
            LifecycleError: a parameter holds another gradient, which would be lost.
        """
        if self.gradients is None or self._attached == self.gradients.revision:
            return False
        self._once = passes == 1 and self._attached is None
        self._attached = self.gradients.revision
        reduced = self.gradients.reduced
        assert reduced is not None  # a reduction has landed
        if self._cast is not None:
            reduced = self._cast.take().copy_(reduced)
        shards = self._shards_of(reduced)
        self._handed_over = self._version_of_copy()
        for managed, shard in zip(self.parameters, shards, strict=True):
            held = self._held(managed.sharded)
            if held is not None and held is not shard:
                raise LifecycleError(_OTHER_GRADIENT.format(name=managed.names[0]))
            if unset and id(managed.raw) in unset:
                managed.weight.unread = read
                continue
            self._put(managed.sharded, shard)
            if has_hooks(managed.sharded):
                run_hooks(managed.sharded, shard, managed.names[0], once=self._once)
        return True

    def reads_at_once(self, unset: set[int]) -> bool:
        """Whether a gradient of `unset` goes to a hook, or where nobody sees that it is read."""
        return not unset.isdisjoint(
            id(managed.raw)
            for managed in self.parameters
            if self._attribute != "grad" or has_hooks(managed.sharded)
        )

    def attach_rest(self, unused: set[int]) -> None:
        """Attach what is unread, but for what no rank has used: its gradient is None."""
        for managed, shard in zip(self.parameters, self._gradient_shards, strict=True):
            if managed.weight.unread is not None:
                managed.weight.unread = None
                if id(managed.raw) not in unused and shard is not None:
                    self._put(managed.sharded, shard)
                    if has_hooks(managed.sharded):
                        run_hooks(managed.sharded, shard, managed.names[0], once=self._once)

    @property
    def is_attached(self) -> bool:
        """Whether a reduced gradient of this cycle was handed over."""
        return self._attached is not None

    @property
    def holds_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        found = any(self._held(managed.sharded) is not None for managed in self.parameters)
        return found or any(
            getattr(p.sharded, self._attribute, None) is not None for p in self.parameters
        )

    def follow_changes(self) -> None:
        """Add what comes next to the gradients that the user sees: removed ones are zeros."""
        if self.gradients is None or self.gradients.reduced is None:
            return
        if self._viewed is not None and self._version_of_copy() != self._handed_over:
            self.gradients.reduced.copy_(self._viewed)
        for index, view in enumerate(self.local_views(self.gradients.reduced)):
            managed = self.parameters[index]
            if self._held(managed.sharded) is None and managed.weight.unread is None:
                view.zero_()

    def _version_of_copy(self) -> int:
        """Grows when a cast copy is changed, as a shard or its rows; 0 where there is none."""
        if self._cast is None or self._viewed is None:
            return 0
        shards = (shard._version for shard in self._gradient_shards if shard is not None)
        return self._viewed._version + sum(shards)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradient, the cast copy of it that was handed over, and others.

        Others are those that the user has put in the place of what was handed over.
        """
        if self.gradients is None:
            return
        is_attached = self._attached == self.gradients.revision
        self.gradients.scale(factor)
        if not is_attached:
            return
        self._attached = self.gradients.revision
        if self._cast is not None:
            self._cast.take().mul_(factor)
            self._handed_over = self._version_of_copy()
        for managed, shard in zip(self.parameters, self._gradient_shards, strict=True):
            held = self._held(managed.sharded)
            if held is None or held is shard:
                continue
            own = local_tensor(held)
            if shard is None or own.data_ptr() != local_tensor(shard).data_ptr():
                own.mul_(factor)

    def look(self) -> bool:
        """Whether a weight has changed since the last look; raises as `ManagedParameter.look`."""
        changed = False
        for managed in self.parameters:
            changed |= managed.look()
        return changed

    def show_raw(self) -> None:
        """Let modules see compute weights."""
        for managed in self.parameters:
            managed.show_raw()

    def abandon_gradients(self) -> None:
        """Drop what a backward pass that raised has left outside of the accumulator."""
        if self.gradients is not None:
            self.gradients.drop_bucket()
            for managed in self.parameters:
                managed.raw.grad = None

    def reset_gradients(self, *, keeps_zeros: bool) -> None:
        """Begin a new cycle without gradients; keeps_zeros: with zeros where there were some.

        What is attached as `.grad` the module's own zero_grad has made zero, cast copies included.
        """
        if self.gradients is None:
            return
        self.gradients.reset()
        self._attached = None
        reduced = self.gradients.reduced
        if keeps_zeros and reduced is not None and self.holds_gradients:
            reduced.zero_()
            return
        for managed in self.parameters:
            setattr(managed.sharded, self._attribute, None)
        if self._cast is not None:
            self._cast.give()
        if self.gradients.give_back() or self._cast is not None:
            self._forget_memory()

    def _shards_of(self, reduced: torch.Tensor) -> Sequence[DTensor]:
        """The gradients as views of `reduced`, in objects of former cycles where there are some."""
        shards: list[Any] = self._gradient_shards
        if self._viewed is not reduced:
            self._viewed = reduced
            for index in range(len(shards)):
                view = self.local_view(index, reduced)
                if shards[index] is None:
                    shards[index] = _gradient_of(self.parameters[index], view)
                else:
                    shards[index]._local_tensor = view
        return shards

    def _forget_memory(self) -> None:
        """Let the memory of gradients go; those that somebody else holds keep theirs."""
        self._viewed = None
        shards: list[Any] = self._gradient_shards
        for index in range(len(shards)):
            if shards[index] is not None and sys.getrefcount(shards[index]) == _ALONE:
                shards[index]._local_tensor = _NOTHING
            else:
                shards[index] = None

    @torch.no_grad()
    def _adopt(self) -> None:
        """Move the parameters' values into the buffers and make both faces of each."""
        weights = self.weights
        given = [None if self.plan.primary else local_data(p.raw) for p in self.parameters]
        for index, value in enumerate(given):
            if value is not None:
                view = weights.full.tensor(index)
                view.copy_(value)
                move_to(self.parameters[index].raw, view)
        weights.adopt()
        loaded = [self._load_first(index, value) for index, value in enumerate(given)]
        for index, local in enumerate(self.local_views(weights.main)):
            self._make_sharded(index, local)
        weights.begin(anew=any(loaded))
        for managed in self.parameters:
            managed.watch()

    def _load_first(self, index: int, given: torch.Tensor | None) -> bool:
        """Let a main weight begin with what no full buffer holds; False if there is no such value.

        Rounded weights may have kept what they were drawn as, under upstream's names, which are
        Transformer Engine's: any parameter may have them. given: what the full buffer was filled
        with, rounded where it computes in another dtype.
        """
        managed = self.parameters[index]
        if given is None:
            value = initial_values(managed.names[0], managed.raw)
        elif has_drawn_values(managed.raw):
            value = take_drawn_values(managed.raw)
        elif given.dtype != self.dtypes.compute:
            value = given
        else:
            return False
        self.load_part(index, local_data(value))
        return True

    def _make_sharded(self, index: int, local: torch.Tensor) -> None:
        """The shard that the user sees, with the attributes of the parameter."""
        managed = self.parameters[index]
        shard = self._as_dtensor(index, local)
        managed.sharded = sharded_weight(shard, requires_grad=managed.raw.requires_grad)
        managed.offsets = self._offsets(index)
        remember_offsets(managed.sharded, managed.offsets)
        for name, value in marks_of(managed.raw).items():
            if not hasattr(managed.sharded, name):
                setattr(managed.sharded, name, value)

    def _offsets(self, index: int) -> Offsets:
        """Where this rank's rows of a parameter begin in all of it; a sharded scalar is a row."""
        offsets = self.parameters[index].part.offsets
        if not self._shards_optimizer:
            return offsets
        first_row = self._rows[index].first_row
        return (offsets[0] + first_row, *offsets[1:]) if offsets else (first_row,)

    def _as_dtensor(self, index: int, local: torch.Tensor) -> DTensor:
        managed = self.parameters[index]
        part = managed.part
        placements = dtensor_placements(self._spec.strategy, self._spec.coordinate, part)
        shard = as_dtensor(local, part.whole_shape, self._mesh, placements)
        cut = self.plan.layout.cuts[index] if self._shards_optimizer else ()
        return with_cut(shard, cut, managed.names[0])
