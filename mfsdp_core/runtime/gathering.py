"""At which modules weights are gathered: at a unit's own, or at every module that has some.

[Note: gathering by module] A unit's buckets are gathered when the first module that needs one of
them runs, in the forward pass and again in the backward pass, rather than all of them at the start
of the unit. They are still released and reduced unit by unit. Modules need what they hold
themselves. A module without a `forward`, which nobody calls, leaves its share to the module around
it. A module that reads the weights of modules inside it, instead of calling those, needs them all:
torch's attention, whose output projection is never called, is known; other classes say so with a
true attribute `reads_child_weights`. What the root owns is gathered when the root runs, in both
ways, since models read it from anywhere.

A module that is called while its unit does not run counts as a call of the unit: its weights are
gathered for this call and released after it.

What the next module still needs is gathered ahead, unless something that was gathered ahead is
still waiting for its own module.

Ranks that skip a unit gather it too (see [Note: gather order]), and cannot know which module comes
when. So all gather the buckets of a unit in one order: as they are registered, and once ranks have
seen, and compared, in which order modules run, in that one. What comes before the wanted bucket is
gathered with it, and what is left when the unit is done, or when another one is gathered, before
that. What is recomputed inside of a unit counts as its backward pass. Where that has a payload of
its own, and for modules called outside of their unit, ranks must not differ: there only what is
wanted is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from mfsdp_core.errors import LifecycleError
from mfsdp_core.plan.grouping import ROOT
from mfsdp_core.plan.prefetch import Direction, PrefetchOrder, backward_of_nested
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.param_pipeline import ParamPipeline
from mfsdp_core.runtime.units import Unit, is_called, reads_children
from mfsdp_core.shard.dtensor import local_tensor


@dataclass(eq=False)
class GatherPoint:
    """A module at whose call buckets of `unit` are gathered.

    around: the point of the next module around it. index: position among all points.
    running: the innermost of its calls, as its hooks see it.
    """

    unit: Unit
    module: nn.Module
    buckets: list[Bucket] = field(default_factory=list)
    around: GatherPoint | None = None
    index: int = -1
    running: Any = None

    @cached_property
    def is_unit(self) -> bool:
        """Whether a call of the module is a call of the unit."""
        return self.module is self.unit.module

    def has_returned_weights(self, outputs: list[torch.Tensor]) -> bool:
        """Whether one of `outputs` lies in the memory of gathered weights."""
        held = []
        for bucket in self.unit.buckets if self.is_unit else self.buckets:
            if bucket.weights.comes_and_goes:
                held.append(bucket.weights.full.data.untyped_storage()._cdata)  # noqa: PERF401
        for tensor in outputs if held else ():
            if tensor.layout is torch.strided:
                plain = tensor if type(tensor) is torch.Tensor else local_tensor(tensor)
                if plain.untyped_storage()._cdata in held:
                    return True
        return False


class GatherByUnit:
    """All buckets of a unit at once. Nothing is begun, and there is no order to agree on."""

    partial: tuple[Unit, Direction] | None = None
    seen: Sequence[int] = ()
    is_agreed = False

    def __init__(self, root: Unit, units: list[Unit], params: ParamPipeline) -> None:
        self.points = [GatherPoint(unit, unit.module, unit.buckets) for unit in (root, *units)]
        self._params = params

    def forward(self, point: GatherPoint, *, recomputing: bool) -> None:
        """The module is about to run: what it needs becomes ready and visible."""
        unit = point.unit
        if recomputing and unit.shows_raw:  # its backward pass has begun, and has gathered it
            self._params.ready(unit, "forward")
            return
        self._params.issue(unit, "forward")
        self._params.prefetch(unit, "forward", recomputing=recomputing)
        self._params.ready(unit, "forward")
        unit.show_raw()

    def end_forward(self, point: GatherPoint) -> None:
        """The module has run."""

    def backward(self, point: GatherPoint, **_: bool) -> None:
        """A gradient has reached its output, or it was recomputed: what it needs becomes ready."""
        self._params.ready(point.unit, "backward")
        point.unit.show_raw()

    def ahead(self, point: GatherPoint, direction: Direction) -> None:
        """Gather what follows it."""
        self._params.prefetch(point.unit, direction)

    def end_pass(self) -> None:
        """The root has run."""

    def buckets(self, unit: Unit, _direction: Direction) -> list[Bucket]:
        """All buckets of a unit in the order in which a pass through it gathers them."""
        return unit.buckets

    def complete(self, unit: Unit | None = None, *, forget: bool = False) -> None:
        """Nothing is left: units are gathered as a whole."""

    def follow(self) -> None:
        """Nothing changes."""

    def escapes(self, point: GatherPoint, outputs: list[torch.Tensor], *, hooked: bool) -> None:
        """Nothing can: the unit's weights are there as long as anything of it."""


class GatherByModule:
    """See [Note: gathering by module]."""

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        params: ParamPipeline,
        *,
        prefetch: bool,
        agree: Callable[[Sequence[int]], bool],
    ) -> None:
        self.points = gather_points(root, units)
        self._params = params
        self._prefetch = prefetch
        parents = [None if p.around is None else p.around.index for p in self.points]
        self._order = PrefetchOrder(len(self.points), backward_of_nested(parents), agree=agree)
        self._waiting: list[Bucket] = []
        self._of_unit = {id(p.unit): p for p in self.points if p.is_unit}
        #: The unit of which some buckets were gathered, and others are still to be.
        self.partial: tuple[Unit, Direction] | None = None
        self._ordered: dict[tuple[int, Direction], list[Bucket]] = {}
        for unit in (root, *units):
            self._ordered[id(unit), "forward"] = unit.buckets
            self._ordered[id(unit), "backward"] = unit.buckets[::-1]
        #: Whether all ranks have `seen` the same, and gather in that order from the next pass on.
        self.is_agreed = False
        self._follows = False

    @property
    def seen(self) -> Sequence[int]:
        """The order in which modules have run, by number, for ranks to compare."""
        return self._order.sequence("forward")

    def follow(self) -> None:
        """Before a pass, where the order is agreed: gather in it."""
        if self._follows:
            return
        self._follows = True
        for (unit, direction), buckets in list(self._ordered.items()):
            points = [self.points[index] for index in self._order.sequence(direction)]
            read = [bucket for point in points for bucket in point.buckets]
            order = dict.fromkeys(bucket for bucket in read if bucket in buckets)
            self._ordered[unit, direction] = list(order)

    def buckets(self, unit: Unit, direction: Direction) -> list[Bucket]:
        """All buckets of a unit in the order in which a pass through it gathers them."""
        return self._ordered[id(unit), direction]

    def complete(self, unit: Unit | None = None, *, forget: bool = False) -> None:
        """Gather what a unit, or `unit` alone, has not gathered; forget: or leave it at that."""
        if self.partial is None or unit not in (None, self.partial[0]):
            return
        (begun, direction), self.partial = self.partial, None
        if not forget:
            self._params.issue(begun, direction, self.buckets(begun, direction))

    def escapes(self, point: GatherPoint, outputs: list[torch.Tensor], *, hooked: bool) -> None:
        """Note that a call inside its unit's has ended, and with what tensors.

        Where the module has returned its own weights, or nothing from which a backward pass could
        be seen to begin (not `hooked`), its unit gathers for it from now on.

        Raises:
            LifecycleError: it has returned its weights while its unit does not run.
        """
        returned = point.has_returned_weights(outputs)
        if point.is_unit or (hooked and not returned):
            return
        if returned and not any(one is not point for one in point.unit.open):
            raise LifecycleError(
                f"a {type(point.module).__name__} of unit {point.unit.name} returned its own "
                "weights while the unit does not run, and they are released after the call. Call "
                "the unit, or compute with them inside of the module."
            )
        buckets = self._of_unit[id(point.unit)].buckets
        buckets += [bucket for bucket in point.buckets if bucket not in buckets]

    def forward(self, point: GatherPoint, *, recomputing: bool) -> None:
        """The module is about to run: what it needs becomes ready and visible."""
        self._issue(point.unit, "forward", point.buckets, recomputing=recomputing)
        self._wait_no_more(point)
        if not recomputing:
            self._order.observe(point.index)
            self.ahead(point, "forward")
        self._show(point, "forward")

    def end_forward(self, point: GatherPoint) -> None:
        """The module has run."""
        self._order.observe_end(point.index)
        if point.is_unit:
            self.complete(point.unit)

    def backward(self, point: GatherPoint, *, recomputed: bool = False) -> None:
        """A gradient has reached its output, or it was recomputed: what it needs becomes ready."""
        self._wait_no_more(point)
        self._issue(point.unit, "backward", point.buckets, recomputing=recomputed)
        self._show(point, "backward")

    def ahead(self, point: GatherPoint, direction: Direction) -> None:
        """Gather what the next module still needs, unless something still waits for its module."""
        waits = any(bucket.weights.is_gathered for bucket in self._waiting)
        if not self._prefetch or waits:
            return
        passed = self._params.gathered[direction].gathered
        for index in self._order.upcoming(point.index, direction):
            target = self.points[index]
            if target.unit is not point.unit and target.unit.index in passed:
                continue
            lacking = [bucket for bucket in target.buckets if not bucket.weights.is_gathered]
            if lacking:
                if target.unit is not point.unit:
                    self.complete()
                wanted = self._up_to(target.unit, direction, lacking)
                lacking = [bucket for bucket in wanted if not bucket.weights.is_gathered]
                if self._params.issue_ahead(target.unit, direction, lacking, of=point.unit):
                    self._note(target.unit, direction, wanted)
                    self._waiting = lacking
                return

    def end_pass(self) -> None:
        """The root has run."""
        self._order.finish_pass()

    def _issue(
        self, unit: Unit, direction: Direction, buckets: list[Bucket], *, recomputing: bool
    ) -> None:
        """Start gathering `buckets`, and what comes before them."""
        outside = direction == "forward" and not (recomputing or any(map(_is_unit, unit.open)))
        if outside or (recomputing and any(b.weights.has_two_payloads for b in unit.buckets)):
            self._params.issue(unit, direction, buckets)
            return
        order: Direction = "backward" if recomputing else direction
        wanted = self._up_to(unit, order, buckets)
        if all(bucket.weights.serves(direction) for bucket in wanted):
            return
        if self.partial not in (None, (unit, order)):
            self.complete()
        self._params.issue(unit, direction, wanted)
        self._note(unit, order, wanted)

    def _up_to(self, unit: Unit, direction: Direction, buckets: list[Bucket]) -> list[Bucket]:
        """`buckets` and those before them, in their order."""
        order = self.buckets(unit, direction)
        last = max((order.index(bucket) for bucket in buckets), default=-1)
        return order[: last + 1]

    def _note(self, unit: Unit, direction: Direction, gathered: list[Bucket]) -> None:
        is_all = len(gathered) == len(unit.buckets)
        self.partial = None if is_all else (unit, direction)

    def _wait_no_more(self, point: GatherPoint) -> None:
        self._waiting = [bucket for bucket in self._waiting if bucket not in point.buckets]

    def _show(self, point: GatherPoint, direction: Direction) -> None:
        self._params.ready(point.unit, direction, point.buckets)
        point.unit.shows_raw = True
        for bucket in point.buckets:
            bucket.show_raw()


def _is_unit(point: object) -> bool:
    return isinstance(point, GatherPoint) and point.is_unit


def gather_points(root: Unit, units: list[Unit]) -> list[GatherPoint]:
    """The points of gathering by module, the root's first, then as modules are registered."""
    finder = _Finder(root, units)
    finder.visit(root.module, (), ())
    for index, point in enumerate(finder.points.values()):
        point.index = index
    return list(finder.points.values())


def readers_of(root: nn.Module) -> dict[int, tuple[int, ...]]:
    """By id of every module, the numbers of the modules whose calls read what it holds."""
    finder = _Finder(Unit(ROOT, root, index=None), [])
    finder.visit(root, (), ())
    numbers: dict[int, int] = {}
    return {
        module: tuple(sorted({numbers.setdefault(id(one), len(numbers)) for one in readers}))
        for module, readers in finder.readers.items()
    }


class _Finder:
    """Walks the modules. points: by id of the module and name of the unit. readers: see `visit`."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        first = GatherPoint(root, root.module, root.buckets)
        self.points = {(id(root.module), root.name): first}
        self._units = {id(unit.module): unit for unit in units}
        self.readers: dict[int, list[nn.Module]] = {}
        self._held: dict[int, list[tuple[Unit, Bucket]]] = {}
        for unit in units:
            for bucket in unit.buckets:
                for holder in {holder for p in bucket.parameters for holder, _ in p.holders}:
                    self._held.setdefault(id(holder), []).append((unit, bucket))

    def visit(
        self,
        module: nn.Module,
        readers: tuple[nn.Module, ...],
        around: tuple[GatherPoint, ...],
    ) -> None:
        """readers: modules whose calls read what `module` holds. around: points outside of it."""
        if is_called(module) or not readers:
            readers = tuple(filter(_may_read_children, readers)) or (module,)
        self.readers.setdefault(id(module), []).extend(readers)
        if id(module) in self._units:
            self._point(self._units[id(module)], module, around)
        for unit, bucket in self._held.get(id(module), ()):
            for reader in readers:
                buckets = self._point(unit, reader, around).buckets
                if bucket not in buckets:
                    buckets.append(bucket)
        own = tuple(point for point in self.points.values() if point.module is module)
        for child in module.children():
            self.visit(child, readers, (*around, *own))

    def _point(self, unit: Unit, module: nn.Module, around: tuple[GatherPoint, ...]) -> GatherPoint:
        key = id(module), unit.name
        if key not in self.points:
            self.points[key] = GatherPoint(unit, module, around=around[-1] if around else None)
        return self.points[key]


def _may_read_children(module: nn.Module) -> bool:
    # Torch's encoder layer does so where no module of the model has a hook.
    return isinstance(module, nn.TransformerEncoderLayer) or reads_children(module)


def refuse_ungathered(error: BaseException) -> None:
    """Say what torch's refusal means that came out of a forward pass.

    Raises:
        LifecycleError: torch was to compute with a DTensor and a plain tensor, or with a shard.
    """
    if any(words in str(error) for words in ("mixed torch.Tensor", "needs rows of other ranks")):
        raise LifecycleError(
            f"{str(error).partition(',')[0]}. If the DTensor is a weight of this model, it was "
            "used while its unit was not running, which alone makes it whole. Name in "
            "fsdp_unit_modules the module that computes with it, not one inside that is never "
            "called. Penalties of weights belong outside of the forward pass."
        ) from error
