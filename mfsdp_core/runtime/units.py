"""Choosing units: which modules are sharded and scheduled as one."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from mfsdp_core.errors import UnitSelectionError
from mfsdp_core.plan.grouping import ROOT, enclosing_units
from mfsdp_core.plan.prefetch import Direction, backward_of_nested
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.shard.dtensor import local_tensor


@dataclass
class GradientSync:
    """Along which mesh axes gradients of a unit are reduced; none: added up on this rank."""

    axes: Literal["none", "inner", "both"] = "both"


@dataclass(eq=False)
class Unit:
    """A module, its buckets, and where it stands in the pass that is running.

    index: position among the non-root units in registration order, None for the root. Negative for
    a bucket of the root, which is reduced as a unit of its own and gathered with the root.
    around: the units that this one is nested in, from the outermost; the root is not among them.
    missing: trainable parameters (by id of raw) whose gradient this backward pass still owes.
    open: modules, as gather points, whose calls count as calls of the unit and are running.
    ahead: whether its weights were gathered ahead and it has not run since.
    active_backwards: calls of the module whose backward has begun and not ended.
    has_backward: False once a call with gradients enabled returned nothing that requires one.
    epoch: counts changes of its weights, so that a graph of before one is known.
    shows_raw: whether its modules see compute weights, or some of them.
    stays: passes at whose end its weights are not released. followers: by direction, the
    units that are gathered ahead when it runs, in place of those that follow.
    sync: what becomes of its gradients; the root's buckets share that of the root.
    """

    name: str
    module: nn.Module
    index: int | None
    buckets: list[Bucket] = field(default_factory=list)
    around: list[Unit] = field(default_factory=list)
    open: list[GatherPoint] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    active_backwards: int = 0
    ahead: bool = False
    has_backward: bool = True
    epoch: int = 0
    shows_raw: bool = True
    stays: set[Direction] = field(default_factory=set)
    followers: dict[Direction, list[Unit]] = field(default_factory=dict)
    sync: GradientSync = field(default_factory=GradientSync)

    @cached_property
    def place(self) -> int:
        """`index`, of anything but the root itself."""
        assert self.index is not None
        return self.index

    @cached_property
    def is_of_root(self) -> bool:
        """Whether it is the root, or a bucket of it."""
        return self.index is None or self.index < 0

    @cached_property
    def shown_by(self) -> list[nn.Module]:
        """Modules whose calls show when a bucket of the root is used; none where nobody sees it.

        Of those behind the first unit, as all others reduce last anyway, whose gradients are not
        kept whole. Who reads what the root itself holds, or a module without `forward`, is unseen.
        """
        (bucket,) = self.buckets
        holders = {id(m): m for managed in bucket.parameters for m, _ in managed.holders}
        is_early = bucket.plan.is_behind and not self.gradients[0].holds_whole
        is_seen = id(self.module) not in holders and all(map(is_called, holders.values()))
        return list(holders.values()) if is_early and is_seen else []

    @cached_property
    def gradients(self) -> list[GradientBuffers]:
        """Gradients of the trainable buckets, in bucket order."""
        return [bucket.gradients for bucket in self.buckets if bucket.gradients is not None]

    @cached_property
    def shares_parameters(self) -> bool:
        """Whether a parameter is held by several modules.

        Reentrant checkpointing runs nested backward passes, so such a parameter may get gradients
        again after autograd has finished it in the outer graph.
        """
        return any(
            len({id(holder) for holder, _ in managed.holders}) > 1
            for bucket in self.buckets
            for managed in bucket.parameters
        )

    @property
    def is_held_back(self) -> bool:
        """Whether its gradients are not complete at the end of a cycle."""
        axes, awaits_outer = self.sync.axes, any(one.awaits_outer for one in self.gradients)
        return axes == "none" or (axes == "inner" and awaits_outer)

    @cached_property
    def trainable(self) -> frozenset[int]:
        """The trainable parameters, by id of raw."""
        trainable = (bucket for bucket in self.buckets if bucket.gradients is not None)
        return frozenset(id(managed.raw) for bucket in trainable for managed in bucket.parameters)

    @cached_property
    def _faces(self) -> list[tuple[nn.Module, str, ManagedParameter]]:
        """Where the parameters are seen: module, attribute, parameter."""
        parameters = [managed for bucket in self.buckets for managed in bucket.parameters]
        return [(*holder, managed) for managed in parameters for holder in managed.holders]

    def check_held(self) -> None:
        """Refuse parameters that were put in the place of this unit's."""
        for module, attribute, managed in self._faces:
            held = module._parameters.get(attribute)
            if held is not managed.sharded and not (self.shows_raw and held is managed.raw):
                managed.refuse(held)

    def forget_buckets(self) -> None:
        """Be as before it had any."""
        self.buckets = []
        for name in ("gradients", "shares_parameters", "trainable", "_faces"):
            vars(self).pop(name, None)

    def show_raw(self) -> None:
        """Let the modules of this unit see compute weights."""
        self.shows_raw = True
        for module, attribute, managed in self._faces:
            module._parameters[attribute] = managed.raw

    def show_sharded(self) -> None:
        """Let the modules of this unit see shards."""
        self.shows_raw = False
        for module, attribute, managed in self._faces:
            module._parameters[attribute] = managed.sharded


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


def resolve_unit_classes(
    unit_modules: Iterable[type[nn.Module] | str] | None,
) -> tuple[type[nn.Module], ...]:
    """Module classes for classes and import paths such as `package.module.Layer`.

    Raises:
        UnitSelectionError: not a module class, or nothing can be imported under that path.
    """
    if isinstance(unit_modules, (str, type)):
        unit_modules = [unit_modules]
    classes = tuple(_resolve_class(entry) for entry in unit_modules or ())
    if unit_modules is not None and not classes:
        warnings.warn(
            "fsdp_unit_modules is empty: the whole model is one unit, which is gathered and "
            "reduced at once. Name the classes of its layers, or pass None if that is meant.",
            UserWarning,
            stacklevel=5,
        )
    return classes


def select_units(
    root: nn.Module, classes: tuple[type[nn.Module], ...], *, nested: bool = False
) -> list[tuple[str, nn.Module]]:
    """Modules of the given classes, registration order; of nested matches the outermost, or all.

    The root itself is never among them: it owns what is left. Nor are modules inside one that
    computes with their weights instead of calling them.

    Raises:
        UnitSelectionError: a class that no submodule has, or one without a `forward`.
    """
    chosen: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            if classes and isinstance(child, classes):
                _check_called(child, child_path)
                seen.add(id(child))
                chosen.append((child_path, child))
                if not nested:
                    continue
            if not reads_children(child):
                walk(child, child_path)

    walk(root, ROOT)
    for wanted in classes:
        if not any(isinstance(module, wanted) for module in root.modules()):
            present = sorted({type(module).__name__ for module in root.modules()})
            raise UnitSelectionError(
                f"fsdp_unit_modules names {wanted.__name__}, of which the model has none. "
                f"It has: {', '.join(present)}."
            )
    return chosen


def is_called(module: nn.Module) -> bool:
    """Whether it has a `forward`."""
    return type(module).forward is not nn.Module.forward


def reads_children(module: nn.Module) -> bool:
    """Whether it computes with the weights of modules inside it, instead of calling those."""
    return isinstance(module, nn.MultiheadAttention) or bool(
        getattr(module, "reads_child_weights", False)
    )


def _check_called(module: nn.Module, path: str) -> None:
    if not is_called(module):
        raise UnitSelectionError(
            f"fsdp_unit_modules names {type(module).__name__}, and {path} is one, which has no "
            "forward(): nobody calls it, so nothing would gather its weights. Name the class of "
            "the module around it."
        )


def nest_units(units: list[Unit]) -> list[int]:
    """Give each unit its index and the units around it; returns the backward order of indices.

    units: those that own parameters, registration order.
    """
    parents = enclosing_units([unit.name for unit in units])
    for index, (unit, parent) in enumerate(zip(units, parents, strict=True)):
        unit.index = index
        # A unit is registered after the one around it, whose own list is therefore complete.
        unit.around = [] if parent is None else [*units[parent].around, units[parent]]
    return backward_of_nested(parents)


def _resolve_class(entry: type[nn.Module] | str) -> type[nn.Module]:
    if isinstance(entry, str):
        path, _, name = entry.rpartition(".")
        try:
            found = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnitSelectionError(
                f"fsdp_unit_modules: cannot import {entry!r} ({error}). "
                "Give a class, or the full path `package.module.Class`."
            ) from error
    else:
        found = entry
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UnitSelectionError(
            f"fsdp_unit_modules: expected module classes or their import paths, found {entry!r}."
        )
    return found
