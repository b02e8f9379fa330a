"""Row-aligned flat layout of the parameters of one bucket, and the padding rule.

A bucket of N slices over three tensors; `|` is a slice boundary, `.` padding:

    rank         0               1               2
             |aaaa aaaa aaaa|aaaa bbbb bb c|c c c . . . .|
                  rows of a      b  b  fragments

    * a tensor starts at a multiple of its row (elements of `shape[1:]`; 1 for a vector), and of 16
      elements, 16 bytes in any dtype, or else of 8 or 4, where that takes no more padding than the
      rule allows, and no more than `PADDING_BUDGET` above a layout without;
    * a slice is a multiple of the least common multiple of all rows, so that no slice boundary cuts
      a row: what a rank holds of a tensor is whole rows of dim 0, perhaps none;
    * the layout is a pure function of shapes and N, hence equal on all ranks.

[Note: padding rule] Padding, relative to the elements used, may exceed what the largest member
alone would need on that many ranks by at most `PADDING_BUDGET`; beyond it `split_by_padding` makes
several buckets. Of equally large members the one that needs least counts, so that the order of the
shapes changes nothing. Ten rows on four ranks cannot avoid 20 %, whereas a convolution next to a
linear layer would multiply memory without the rule (R19).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm, prod
from typing import Any

from mfsdp_core.errors import LayoutError

#: Padding that a bucket may have above that of its largest member alone, relative to its elements.
PADDING_BUDGET = 0.05

#: Elements that tensors start at multiples of, best first; kernels read 16 bytes at a time.
ALIGNMENTS = (16, 8, 4)

Shape = tuple[int, ...]


def row_elements(shape: Shape) -> int:
    """Elements of one dim-0 row; a scalar is one row of one element."""
    return prod(shape[1:])


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: elements [offset, offset + elements) of the flat buffer."""

    shape: Shape
    offset: int
    # Read several times per gradient: number of elements, the first one after the tensor, and how
    # far apart neighbours along each dim are.
    elements: int = field(init=False, repr=False, compare=False)
    end: int = field(init=False, repr=False, compare=False)
    strides: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Count once."""
        object.__setattr__(self, "elements", prod(self.shape))
        object.__setattr__(self, "end", self.offset + self.elements)
        sizes = [max(1, size) for size in self.shape]
        strides = (prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        object.__setattr__(self, "strides", tuple(strides))


@dataclass(frozen=True, slots=True)
class Rows:
    """What some slices hold of tensor `index`: whole rows of dim 0, perhaps none.

    start: element of the slices at which they begin. columns: elements of a row.
    """

    index: int
    first_row: int
    rows: int
    columns: int
    start: int

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.rows * self.columns

    @property
    def where(self) -> slice:
        """Where they lie in a flat tensor of the slices."""
        return slice(self.start, self.start + self.elements)

    def of(self, flat: Any) -> Any:
        """View [rows, columns] of a flat tensor of the slices."""
        return flat[self.where].view(-1, self.columns)


@dataclass(frozen=True)
class Layout:
    """Slots in the order of the shapes they were built from, over `slices` equal slices.

    Raises:
        LayoutError: slots that overlap, leave the buffer, or are cut inside a row.
    """

    slots: tuple[Slot, ...]
    slices: int
    slice_elements: int

    def __post_init__(self) -> None:
        """Check the invariants of the module docstring."""
        end = 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            row = max(1, row_elements(slot.shape))
            if slot.offset < end and slot.elements:
                raise LayoutError(f"{slot} overlaps its predecessor, which ends at {end}")
            if slot.offset % row or self.slice_elements % row:
                raise LayoutError(
                    f"{slot} is not row aligned in slices of {self.slice_elements} elements"
                )
            end = max(end, slot.end)
        if end > self.total_elements:
            raise LayoutError(f"slots end at {end}, past the buffer of {self.total_elements}")

    @property
    def total_elements(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.slices * self.slice_elements

    @property
    def used_elements(self) -> int:
        """Elements of the tensors alone."""
        return sum(slot.elements for slot in self.slots)

    @property
    def padding_fraction(self) -> float:
        """Padding relative to the elements used; 0 for an empty layout."""
        used = self.used_elements
        return (self.total_elements - used) / used if used else 0.0

    def rows_in(self, index: int, slices: range) -> Rows:
        """What `slices` hold of tensor `index`."""
        slot, size = self.slots[index], self.slice_elements
        low, high = slices.start * size, slices.stop * size
        start, end = max(slot.offset, low), min(slot.end, high)
        row = row_elements(slot.shape)
        if start >= end or row == 0:
            before = slot.shape[0] if slot.shape and slot.end <= low else 0
            return Rows(index, before, 0, row, 0)
        return Rows(index, (start - slot.offset) // row, (end - start) // row, row, start - low)

    def all_in(self, slices: range) -> Iterator[Rows]:
        """What `slices` hold of every tensor, those that they hold nothing of left out."""
        found = (self.rows_in(index, slices) for index in range(len(self.slots)))
        return (rows for rows in found if rows.rows)

    def used_in(self, slices: range) -> int:
        """Elements of tensors in `slices`."""
        return sum(rows.elements for rows in self.all_in(slices))

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each tensor in each slice; kept, as every gradient of every step has its own."""
        return tuple(map(self._cut, range(len(self.slots))))

    def _cut(self, index: int) -> tuple[int, ...]:
        slot, rows = self.slots[index], [0] * self.slices
        if slot.elements:
            first, end = slot.offset // self.slice_elements, -(-slot.end // self.slice_elements)
            each = (range(rank, rank + 1) for rank in range(first, end))
            rows[first:end] = [self.rows_in(index, one).rows for one in each]
        return tuple(rows)

    @cached_property
    def gaps(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of the buffer that belong to no tensor, in order."""
        held = sorted((slot.offset, slot.end) for slot in self.slots if slot.elements)
        edges = [0, *(edge for both in held for edge in both), self.total_elements]
        return [
            (low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high
        ]


def build_layout(shapes: Sequence[Shape], slices: int) -> Layout:
    """Pack tensors of `shapes` into one buffer of `slices` equal slices, aligned as well as may be.

    Tensors that fill whole chunks (the least common multiple of the rows) come first and leave no
    gap. The rest follow with the widest rows first, each into the first gap that takes it.

    Raises:
        LayoutError: `slices` is not positive.
    """
    if slices < 1:
        raise LayoutError(f"expected at least one slice, found {slices}")
    packed = _pack(shapes, slices, 1)
    most = packed.padding_fraction + PADDING_BUDGET
    aligned = (_pack(shapes, slices, alignment) for alignment in ALIGNMENTS)
    fit = (one for one in aligned if one.padding_fraction <= most and within_padding_budget(one))
    return next(fit, packed)


def _pack(shapes: Sequence[Shape], slices: int, alignment: int) -> Layout:
    chunk = lcm(*(max(1, row_elements(shape)) for shape in shapes)) if shapes else 1
    order = sorted(range(len(shapes)), key=lambda i: _packing_key(shapes[i], chunk))
    offsets = [0] * len(shapes)
    gaps: list[tuple[int, int]] = []
    cursor = 0
    for index in order:
        elements = prod(shapes[index])
        step = lcm(max(1, row_elements(shapes[index])), alignment)
        offset = _take_gap(gaps, step, elements)
        if offset is None:
            offset = _round_up(cursor, step)
            if offset > cursor:
                gaps.append((cursor, offset))
            cursor = offset + elements
        offsets[index] = offset
    slice_elements = _round_up(cursor, chunk * slices) // slices
    slots = tuple(Slot(tuple(s), o) for s, o in zip(shapes, offsets, strict=True))
    return Layout(slots, slices, slice_elements)


def within_padding_budget(layout: Layout) -> bool:
    """Whether `layout` keeps [Note: padding rule]."""
    if len(layout.slots) <= 1:
        return True
    most = max(slot.elements for slot in layout.slots)
    largest = {slot.shape for slot in layout.slots if slot.elements == most}
    alone = min(_pack([one], layout.slices, 1).padding_fraction for one in largest)
    return layout.padding_fraction <= alone + PADDING_BUDGET


def split_by_padding(shapes: Sequence[Shape], slices: int) -> list[list[int]]:
    """Indices of `shapes`, partitioned so that every part keeps [Note: padding rule].

    One part where the whole group keeps it. Otherwise tensors go, widest rows and largest first,
    into the first part that still keeps it. Indices within a part, and parts by their first index,
    stay in the given order.
    """
    if within_padding_budget(build_layout(shapes, slices)):
        return [list(range(len(shapes)))]
    parts: list[list[int]] = []
    keys = [(-row_elements(shape), -prod(shape)) for shape in shapes]
    for index in sorted(range(len(shapes)), key=keys.__getitem__):
        for part in parts:
            joined = build_layout([shapes[i] for i in (*part, index)], slices)
            if within_padding_budget(joined):
                part.append(index)
                break
        else:
            parts.append([index])
    return sorted(sorted(part) for part in parts)


def _packing_key(shape: Shape, chunk: int) -> tuple[bool, int, int]:
    elements = prod(shape)
    if elements % chunk == 0:
        return (False, 0, 0)
    return (True, -row_elements(shape), -elements)


def _take_gap(gaps: list[tuple[int, int]], step: int, elements: int) -> int | None:
    """Offset, a multiple of `step`, of `elements` in the first gap with room; the gap shrinks."""
    for position, (start, end) in enumerate(gaps):
        offset = _round_up(start, step)
        if offset + elements <= end:
            rest = [(start, offset), (offset + elements, end)]
            gaps[position : position + 1] = [(low, high) for low, high in rest if low < high]
            return offset
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
