"""One bucket at run time: its parameters, and the weights and gradients behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.precision.transformer_engine import (
    has_drawn_values,
    initial_values,
    marks_of,
    take_drawn_values,
)
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.runtime.weight_buffers import WeightBuffers
from mfsdp_core.shard.chunk import Offsets, remember_offsets
from mfsdp_core.shard.dtensor import as_dtensor, dtensor_placements
from mfsdp_core.shard.sharded_weight import sharded_weight
from mfsdp_core.shard.tensor_parallel import local_data, move_to
from mfsdp_core.shard.uneven_shard import with_cut


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
    """A bucket of a unit. gradients: None of one that is not trained."""

    def __init__(
        self,
        spec: BucketSpec,
        parameters: list[ManagedParameter],
        weights: WeightBuffers,
        gradients: GradientBuffers | None,
        *,
        axes: DataParallelAxes,
    ) -> None:
        self.plan = spec.plan
        self.parameters = parameters
        self.dtypes = spec.dtypes
        self.weights = weights
        self.gradients = gradients
        self.is_trainable = gradients is not None
        self.axes = axes
        self._spec = spec
        self._shards_optimizer = spec.strategy.inner.shards_optimizer
        self._adopt()

    def facts(self) -> BucketFacts:
        """What it holds."""
        names = tuple(managed.names[0] for managed in self.parameters)
        plan = self.plan
        elements = plan.layout.total_elements
        return BucketFacts(plan.name, plan.unit, names, elements, self.is_trainable)

    def main_part(self, index: int) -> torch.Tensor:
        """A parameter's part of this rank's main weights."""
        return self._spec.local_view(index, self.weights.main)

    def load_part(self, index: int, value: torch.Tensor) -> None:
        """Write what tensor parallelism leaves to this rank into main weights; install follows."""
        if self._shards_optimizer:
            rows = self._spec.own_rows[index]
            shape = self.plan.layout.slots[index].shape or (1,)
            value = value.reshape(shape)[rows.first_row : rows.first_row + rows.rows]
        self.main_part(index).copy_(value)

    def look(self) -> bool:
        """Whether a weight has changed since the last look; raises as `ManagedParameter.look`."""
        changed = False
        for managed in self.parameters:
            changed |= managed.look()
        return changed

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
        for index in range(len(given)):
            self._make_sharded(index)
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

    def _make_sharded(self, index: int) -> None:
        """The shard that the user sees, with the attributes of the parameter."""
        managed, spec = self.parameters[index], self._spec
        part, offsets, cut = managed.part, managed.part.offsets, Offsets()
        if self._shards_optimizer:  # a sharded scalar is a row
            first_row, cut = spec.own_rows[index].first_row, self.plan.layout.cuts[index]
            offsets = (offsets[0] + first_row, *offsets[1:]) if offsets else (first_row,)
        placements = dtensor_placements(spec.strategy, spec.coordinate, part)
        shard = as_dtensor(self.main_part(index), part.whole_shape, self.axes.whole, placements)
        shard = with_cut(shard, cut, managed.names[0])
        managed.sharded = sharded_weight(shard, requires_grad=managed.raw.requires_grad)
        managed.offsets = offsets
        remember_offsets(managed.sharded, offsets)
        for name, value in marks_of(managed.raw).items():
            if not hasattr(managed.sharded, name):
                setattr(managed.sharded, name, value)
