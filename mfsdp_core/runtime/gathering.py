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
from typing import Any

import torch
from torch import nn

from mfsdp_core.errors import LifecycleError
from mfsdp_core.plan.grouping import ROOT
from mfsdp_core.plan.prefetch import Direction, PrefetchOrder, backward_of_nested
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.calls import inside_backward
from mfsdp_core.runtime.schedule import Schedule
from mfsdp_core.runtime.units import GatherPoint, Unit, is_called, reads_children


class ScheduleByModule(Schedule):
    """See [Note: gathering by module]. agree: whether all ranks have seen modules run so."""

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        *given: Any,
        agree: Callable[[Sequence[int]], bool],
        **options: Any,
    ) -> None:
        super().__init__(root, units, *given, **options)
        self.points = gather_points(root, units)
        parents = [None if p.around is None else p.around.index for p in self.points]
        nested = backward_of_nested(parents)
        self._modules = PrefetchOrder(len(self.points), nested, agree=agree)
        self.seen = self._modules.sequence("forward")
        self._waiting: list[Bucket] = []
        self._of_unit = {id(p.unit): p for p in self.points if p.is_unit}
        self._ordered: dict[tuple[int, Direction], list[Bucket]] = {}
        for unit in (root, *units):
            self._ordered[id(unit), "forward"] = unit.buckets
            self._ordered[id(unit), "backward"] = unit.buckets[::-1]
        self._follows = False

    def begin_pass(self) -> None:
        """Where the order of modules is agreed, gather in it from now on."""
        super().begin_pass()
        if self._follows or not self.is_agreed:
            return
        self._follows = True
        for (unit, direction), buckets in list(self._ordered.items()):
            points = [self.points[index] for index in self._modules.sequence(direction)]
            read = [bucket for point in points for bucket in point.buckets]
            order = dict.fromkeys(bucket for bucket in read if bucket in buckets)
            self._ordered[unit, direction] = list(order)

    def buckets(self, unit: Unit, direction: Direction) -> list[Bucket]:
        """All buckets of a unit in the order in which a pass through it gathers them."""
        return self._ordered[id(unit), direction]

    def gather_rest(self, unit: Unit | None = None, *, forget: bool = False) -> None:
        """Gather what a unit, or `unit` alone, has not gathered; forget: or leave it at that."""
        if self.partial is None or unit not in (None, self.partial[0]):
            return
        (begun, direction), self.partial = self.partial, None
        if not forget:
            self.issue(begun, direction, self.buckets(begun, direction))

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

    def start(self, point: GatherPoint, direction: Direction) -> None:
        """Gather what the module needs, and what comes before that."""
        unit, buckets = point.unit, point.buckets
        recomputing = direction == "forward" and inside_backward()
        self._waiting = [bucket for bucket in self._waiting if bucket not in buckets]
        if direction == "forward" and not recomputing:
            self._modules.observe(point.index)
        outside = direction == "forward" and not (recomputing or any(p.is_unit for p in unit.open))
        if outside or (recomputing and any(b.weights.has_two_payloads for b in unit.buckets)):
            self.issue(unit, direction, buckets)
            return
        order: Direction = "backward" if recomputing else direction
        wanted = self._up_to(unit, order, buckets)
        if all(bucket.weights.serves(direction) for bucket in wanted):
            return
        if self.partial not in (None, (unit, order)):
            self.gather_rest()
        self.issue(unit, direction, wanted)
        self._note(unit, order, wanted)

    def show(self, point: GatherPoint) -> None:
        """Return once the module may compute, and sees whole weights."""
        unit = point.unit
        unit.ahead, unit.shows_raw = False, True
        for bucket in point.buckets:
            bucket.weights.complete()
            for managed in bucket.parameters:
                managed.show_raw()

    def ahead(self, point: GatherPoint, direction: Direction) -> None:
        """Gather what the next module still needs, unless something still waits for its module."""
        waits = any(bucket.weights.is_gathered for bucket in self._waiting)
        if not self._prefetch or waits:
            return
        passed = self.gathered[direction].gathered
        for index in self._modules.upcoming(point.index, direction):
            target, unit = self.points[index], self.points[index].unit
            if unit is not point.unit and unit.index in passed:
                continue
            lacking = [bucket for bucket in target.buckets if not bucket.weights.is_gathered]
            if not lacking:
                continue
            if unit is not point.unit:
                self.gather_rest()
            wanted = self._up_to(unit, direction, lacking)
            lacking = [bucket for bucket in wanted if not bucket.weights.is_gathered]
            if not any(bucket.weights.is_gathered for bucket in unit.buckets):
                upcoming = [] if unit.index is None else [unit.index]
                if not self._chosen(upcoming, of=point.unit):
                    return
                unit.ahead = True
            self.issue(unit, direction, lacking)
            self._publish(lacking)
            self._note(unit, direction, wanted)
            self._waiting = lacking
            return

    def end_forward(self, point: GatherPoint) -> None:
        """The module has run."""
        self._modules.observe_end(point.index)
        if point.is_unit:
            self.gather_rest(point.unit)

    def end_pass(self) -> None:
        """The root has run."""
        self._modules.finish_pass()
        self.seen = self._modules.sequence("forward")
        super().end_pass()

    def _up_to(self, unit: Unit, direction: Direction, buckets: list[Bucket]) -> list[Bucket]:
        """`buckets` and those before them, in their order."""
        order = self.buckets(unit, direction)
        last = max((order.index(bucket) for bucket in buckets), default=-1)
        return order[: last + 1]

    def _note(self, unit: Unit, direction: Direction, gathered: list[Bucket]) -> None:
        is_all = len(gathered) == len(unit.buckets)
        self.partial = None if is_all else (unit, direction)


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
