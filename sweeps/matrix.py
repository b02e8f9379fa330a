"""Expansion of a matrix into cells. Pure: no file, no machine, no clock.

Order is the order of the file: product axes first, then zip groups; the last written varies
fastest. Then the included cells. The same definition always gives the same cells and ids.

    product: A x B, zip: (C, D)     A1 B1 (C1 D1) | A1 B1 (C2 D2) | A1 B2 (C1 D1) | ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from bench.spec import RunSpec
from sweeps.settings import (
    Scalar,
    Settings,
    full_path,
    run_spec,
    short_path,
    shown_setting,
    spec_value,
)

MAX_CELLS = 10_000

ARM = "arm"
"""Key under which an override may name the arm that runs a cell."""


@dataclass(frozen=True)
class AxisValue:
    """One value of an axis: what it is called, what it sets, and where it was written."""

    label: str
    settings: Settings
    line: int = 1
    bare: bool = False  # the label says enough in an id without the axis' name before it

    def id_part(self, axis: str) -> str:
        """What this value of `axis` adds to a cell's id: `mfsdp`, `seq_len=64`."""
        return self.label if self.bare else f"{axis.rpartition('.')[2]}={self.label}"


@dataclass(frozen=True)
class Axis:
    """A named list of values. The name is a setting (short form) or, for bundles, a word."""

    name: str
    values: tuple[AxisValue, ...]
    line: int = 1


@dataclass(frozen=True)
class Condition:
    """Which cells a rule means: every key's text matches one of its patterns (globs)."""

    patterns: Mapping[str, tuple[str, ...]]
    line: int = 1

    def matches(self, cell: MatrixCell) -> bool:
        """Whether every key of the condition matches `cell`."""
        return all(
            any(fnmatchcase(cell.text(key), pattern) for pattern in patterns)
            for key, patterns in self.patterns.items()
        )


@dataclass(frozen=True)
class Override:
    """Settings that cells matching `when` receive on top of their own."""

    when: Condition
    settings: Settings


@dataclass(frozen=True)
class MatrixCell:
    """One point of the matrix: a readable unique id, the label on each axis, and all settings."""

    id: str
    labels: Mapping[str, str]
    settings: Settings
    origins: tuple[AxisValue, ...] = field(default=(), compare=False)

    @property
    def spec(self) -> RunSpec:
        """The run that this cell asks for."""
        return run_spec(self.settings)

    def text(self, key: str) -> str:
        """What a condition's key says of this cell: `cell`, an axis' label or a setting's value.

        A missing axis (an included cell need not name them all) reads as an empty text.
        """
        if key == "cell":
            return self.id
        if key in self.labels:
            return self.labels[key]
        return spec_value(self.spec, full_path(key)) if "." in key else ""


@dataclass(frozen=True)
class Matrix:
    """All that expansion needs. Axes of one zip group have the same length."""

    base: Settings = field(default_factory=dict)
    product: tuple[Axis, ...] = ()
    zips: tuple[tuple[Axis, ...], ...] = ()
    include: tuple[tuple[AxisValue, Mapping[str, str]], ...] = ()
    exclude: tuple[Condition, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Product axes, then the axes of every zip group, as written."""
        return (*self.product, *itertools.chain.from_iterable(self.zips))

    @property
    def labels(self) -> dict[str, list[str]]:
        """Every axis with the labels that cells have on it, included cells too."""
        labels = {axis.name: [value.label for value in axis.values] for axis in self.axes}
        for _, included in self.include:
            for name, label in included.items():
                labels.setdefault(name, []).append(label)
        return labels

    @property
    def size(self) -> int:
        """Cells before `exclude` and `include`: the product of all lengths."""
        lengths = [len(axis.values) for axis in self.product]
        lengths += [len(group[0].values) for group in self.zips if group]
        return math.prod(lengths)


def expand(
    matrix: Matrix, arm: str | None = None, settings: Settings | None = None
) -> tuple[MatrixCell, ...]:
    """Every cell, in order, with `exclude`, `include` and `overrides` applied.

    Args:
        matrix: what to expand.
        arm: the arm that runs the cells; rules may name it by the key `arm`.
        settings: of that arm, on top of the cell's and below the overrides'.
    """
    written = [
        cell
        for cell in _combinations(matrix)
        if not any(rule.matches(cell) for rule in matrix.exclude)
    ]
    written += [
        MatrixCell(value.label, dict(labels), {**matrix.base, **value.settings}, (value,))
        for value, labels in matrix.include
    ]
    named = _with_unique_ids(written)
    if arm is not None:
        named = [_of_arm(cell, arm, settings or {}) for cell in named]
    return tuple(_overridden(cell, matrix.overrides) for cell in named)


def _of_arm(cell: MatrixCell, arm: str, settings: Settings) -> MatrixCell:
    own = AxisValue(arm, settings, cell.origins[-1].line if cell.origins else 1)
    return replace(
        cell,
        labels={**cell.labels, ARM: arm},
        settings={**cell.settings, **settings},
        origins=(*cell.origins, own),
    )


def _combinations(matrix: Matrix) -> Iterable[MatrixCell]:
    if not matrix.axes:
        # A file of included cells alone has no point of its own in an empty product.
        return [] if matrix.include else [MatrixCell("base", {}, matrix.base)]
    dimensions: list[list[tuple[tuple[Axis, AxisValue], ...]]] = [
        [((axis, value),) for value in axis.values] for axis in matrix.product
    ]
    for group in matrix.zips:
        rows = zip(*(axis.values for axis in group), strict=True)
        dimensions.append([tuple(zip(group, row, strict=True)) for row in rows])
    return [
        _point(matrix, tuple(itertools.chain.from_iterable(choice)))
        for choice in itertools.product(*dimensions)
    ]


def _point(matrix: Matrix, choice: Sequence[tuple[Axis, AxisValue]]) -> MatrixCell:
    settings = dict(matrix.base)
    for _, value in choice:
        settings.update(value.settings)
    shown = [pair for pair in choice if len(pair[0].values) > 1] or choice
    return MatrixCell(
        id="-".join(value.id_part(axis.name) for axis, value in shown),
        labels={axis.name: value.label for axis, value in choice},
        settings=settings,
        origins=tuple(value for _, value in choice),
    )


def _overridden(cell: MatrixCell, rules: Iterable[Override]) -> MatrixCell:
    """Rules look at the cell as the matrix wrote it, so their order matters only for ties."""
    settings = dict(cell.settings)
    for rule in rules:
        if rule.when.matches(cell):
            settings.update(rule.settings)
    return replace(cell, settings=settings)


def _with_unique_ids(cells: Sequence[MatrixCell]) -> list[MatrixCell]:
    """Number the second and later bearers of an id: `a`, `a~2`, `a~3`."""
    taken: set[str] = set()
    result = []
    for cell in cells:
        name, count = cell.id, 1
        while name in taken:
            count += 1
            name = f"{cell.id}~{count}"
        taken.add(name)
        result.append(replace(cell, id=name))
    return result


def pinned(matrix: Matrix, settings: Settings) -> Matrix:
    """The matrix with `settings` (full paths) fixed in every cell, as `--set` asks.

    An axis over a fixed setting keeps the length 1; in a zip group, which must stay aligned, every
    value becomes the fixed one. Bundles, included cells and overrides have the setting replaced.
    """
    fixed = dict(settings)
    shown = {short_path(path): value for path, value in settings.items()}

    def pin_value(value: AxisValue) -> AxisValue:
        kept = {path: fixed.get(path, old) for path, old in value.settings.items()}
        return replace(value, settings=kept)

    def pin_axis(axis: Axis, *, aligned: bool) -> Axis:
        if axis.name in shown:
            value = path_value(axis.name, shown[axis.name], axis.line)
            return replace(axis, values=(value,) * (len(axis.values) if aligned else 1))
        return replace(axis, values=tuple(pin_value(value) for value in axis.values))

    return replace(
        matrix,
        base={**matrix.base, **fixed},
        product=tuple(pin_axis(axis, aligned=False) for axis in matrix.product),
        zips=tuple(tuple(pin_axis(a, aligned=True) for a in group) for group in matrix.zips),
        include=tuple(
            (pin_value(value), _pinned_labels(labels, shown)) for value, labels in matrix.include
        ),
        overrides=tuple(
            replace(rule, settings={p: fixed.get(p, old) for p, old in rule.settings.items()})
            for rule in matrix.overrides
        ),
    )


def _pinned_labels(labels: Mapping[str, str], shown: Settings) -> Mapping[str, str]:
    return {
        name: shown_setting(name, shown[name]) if name in shown else old
        for name, old in labels.items()
    }


def path_value(name: str, value: Scalar, line: int = 1) -> AxisValue:
    """The value of an axis that is a setting (`name` in short form, `value` checked).

    Words need no name before them in an id; numbers, switches and environment variables do.
    """
    bare = isinstance(value, str) and value != "" and not name.startswith("env.")
    return AxisValue(shown_setting(name, value), {full_path(name): value}, line, bare=bare)
