"""FP8 weights in plain torch: four recipes that run wherever torch does, as a codec.

    recipe    one scale per      scale                               scales on the wire
    delayed   tensor             of the largest maximum of earlier   none
                                 steps; 1 in the first
    current   tensor             of the maximum                      none
    block     128 x 128          of the block's maximum              none
    mxfp8     1 x 32 of rows,    a power of two (E8M0)               the rows', a byte each
              32 x 1 of columns

A matrix is [shape[0], the rest]; blocks at its edges are smaller. Codes are E4M3, a byte each. The
maxima of blocks that a shard may cut are MAX-reduced over the ranks in FP32: every rank then knows
those scales. A block of a row is never cut, since shards are whole rows.

Codes are multiplied by the scale when they are decoded. It is maximum / 448 times 2^margin, under
mxfp8 rounded up to a power of two, so that only delayed scaling saturates; 1 for zeros. Main
weights are cast to the compute dtype before anything else. MXFP8 decodes rows for forward passes
and columns for backward ones; these are other values. Maxima of earlier steps are in no checkpoint:
delayed scaling starts anew after a load.

Sources: Transformer Engine's documentation of its recipes; OCP Microscaling Formats 1.0 for E8M0.
This is no emulation of Transformer Engine's kernels, whose bits may differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import BOTH, Payload
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.precision.codec import BucketCodec, Shard

Recipe = Literal["delayed", "current", "block", "mxfp8"]
Grid = torch.Tensor

#: Largest finite E4M3 number.
LARGEST = 448.0
_E8M0_BIAS = 127
#: Exponents of scales that FP32 represents without loss.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127


@dataclass(frozen=True)
class Codes:
    """One array of codes. block: rows and columns under one scale, None for all of them.

    scales: the payload that carries its scales; None where every rank knows them.
    """

    payload: str
    block: tuple[int | None, int | None]
    scales: str | None = None
    directions: frozenset[Direction] = BOTH


_CODES: Mapping[Recipe, tuple[Codes, ...]] = {
    "delayed": (Codes("codes", (None, None)),),
    "current": (Codes("codes", (None, None)),),
    "block": (Codes("codes", (128, 128)),),
    "mxfp8": (
        Codes("row_codes", (1, 32), "row_scales", frozenset({"forward"})),
        Codes("column_codes", (32, 1), None, frozenset({"backward"})),
    ),
}


@dataclass(frozen=True)
class Float8Reference:
    """A `Codec` of matrices; vectors travel as they are.

    margin: powers of two of headroom. history: steps whose maxima delayed scaling looks back at.

    Raises:
        ConfigurationError: an unknown recipe.
    """

    recipe: Recipe
    margin: int = 0
    history: int = 16

    def __post_init__(self) -> None:
        """Check the name."""
        if self.recipe not in get_args(Recipe):
            raise ConfigurationError(
                f"recipe={self.recipe!r}: expected one of {', '.join(get_args(Recipe))}."
            )

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Matrices, and what has more dimensions."""
        del name
        return len(shape) > 1 and prod(shape) > 0

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        """A byte per weight and direction, and the scales that travel."""
        del compute
        found = []
        for codes in _CODES[self.recipe]:
            found.append(Payload(codes.payload, "uint8", layout.slice_elements, codes.directions))
            if codes.scales is not None:
                size = _scale_elements(layout)
                found.append(Payload(codes.scales, "uint8", size, codes.directions))
        return tuple(found)

    def for_bucket(self, shard: Shard) -> BucketCodec:
        """The codec of one bucket, which keeps its scales."""
        return _Bucket(self, shard)


@dataclass(frozen=True)
class _Part:
    """The rows of matrix `index` in a range of slices. where: in a flat tensor of that range."""

    index: int
    first_row: int
    columns: int
    where: slice

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View [rows, columns]."""
        return flat[self.where].view(-1, self.columns)


class _Bucket:
    """Codes and scales of one bucket."""

    def __init__(self, recipe: Float8Reference, shard: Shard) -> None:
        self._recipe = recipe
        self._shard = shard
        self._maxima: deque[torch.Tensor] = deque(maxlen=recipe.history)
        self._scales: dict[str, list[Grid]] = {}

    def encode(self, main: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's codes, and the scales that travel."""
        values = main.to(self._shard.compute)
        for codes in _CODES[self._recipe.recipe]:
            scales = self._scales_of(values, codes)
            for part in self._own():
                scale = _spread(scales[part.index], codes.block, part, part.of(values))
                scaled = (part.of(values).float() / scale).clamp_(-LARGEST, LARGEST)
                part.of(parts[codes.payload]).copy_(_as_bytes(scaled))
            if codes.scales is None:
                self._scales[codes.payload] = scales
            else:
                self._send(scales, parts[codes.scales])

    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Codes times scales."""
        layout = self._shard.layout
        for codes in _CODES[self._recipe.recipe]:
            if direction not in codes.directions:
                continue
            if codes.scales is None:
                scales = self._scales[codes.payload]
            else:
                scales = self._received(gathered[codes.scales])
            for part in _parts(layout, 0, layout.slices):
                numbers = part.of(gathered[codes.payload]).view(torch.float8_e4m3fn).float()
                scale = _spread(scales[part.index], codes.block, part, numbers)
                part.of(weights).copy_(numbers * scale)

    def _own(self) -> Iterator[_Part]:
        shard = self._shard
        return _parts(shard.layout, shard.first_slice, shard.slices)

    def _scales_of(self, values: torch.Tensor, codes: Codes) -> list[Grid]:
        """Scales of all blocks; of blocks in rows of other ranks only where no scale travels."""
        sizes = [_grid(slot.shape, codes.block) for slot in self._shard.layout.slots]
        flat = torch.zeros(sum(map(prod, sizes)), device=values.device)
        grids = [g.view(s) for g, s in zip(flat.split([*map(prod, sizes)]), sizes, strict=True)]
        for part in self._own():
            _enter_maxima(grids[part.index], codes.block, part, part.of(values))
        if codes.scales is None:
            self._shard.reduce_max(flat)
        if self._recipe.recipe == "delayed":
            earlier = [*self._maxima]
            self._maxima.append(flat.clone())
            # No step before: a scale of 1, which is what maxima of 448 without headroom give.
            flat = torch.stack(earlier).amax(0) if earlier else torch.zeros_like(flat)
        scale = torch.where(flat > 0, flat / LARGEST * 2.0**self._recipe.margin, 1.0)
        if self._recipe.recipe == "mxfp8":
            scale = _power_of_two(scale)
        return [g.view(s) for g, s in zip(scale.split([*map(prod, sizes)]), sizes, strict=True)]

    def _send(self, scales: list[Grid], payload: torch.Tensor) -> None:
        shard = self._shard
        payload.fill_(_E8M0_BIAS)
        for index, rows, where in _scale_places(shard.layout, shard.first_slice, shard.slices):
            exponents = torch.frexp(scales[index][rows])[1] - 1
            payload[where].copy_((exponents + _E8M0_BIAS).flatten())

    def _received(self, payload: torch.Tensor) -> list[Grid]:
        layout = self._shard.layout
        found = [
            payload.new_ones(_grid(s.shape, (1, 32)), dtype=torch.float32) for s in layout.slots
        ]
        for index, rows, where in _scale_places(layout, 0, layout.slices):
            exponents = payload[where].to(torch.int32) - _E8M0_BIAS
            target = found[index][rows]
            target.copy_(torch.ldexp(torch.ones_like(target), exponents.view_as(target)))
        return found


def _parts(layout: Layout, first_slice: int, slices: int) -> Iterator[_Part]:
    low, high = first_slice * layout.slice_elements, (first_slice + slices) * layout.slice_elements
    for index, slot in enumerate(layout.slots):
        start, end = max(slot.offset, low), min(slot.end, high)
        if start < end:
            columns = prod(slot.shape[1:])
            first_row = (start - slot.offset) // columns
            yield _Part(index, first_row, columns, slice(start - low, end - low))


def _grid(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, int]:
    """Blocks of a matrix along its rows and its columns."""
    extents = shape[0], prod(shape[1:])
    rows, columns = (1 if b is None else -(-e // b) for e, b in zip(extents, block, strict=True))
    return rows, columns


def _enter_maxima(
    grid: Grid, block: tuple[int | None, int | None], part: _Part, values: torch.Tensor
) -> None:
    """Write the largest magnitudes of `values` into the blocks that they lie in."""
    width = block[1] or part.columns
    padded = torch.nn.functional.pad(values.abs().float(), (0, -part.columns % width))
    of_rows = padded.view(len(values), -1, width).amax(-1)
    height = block[0] or len(values)
    first, before = divmod(part.first_row, height) if block[0] else (0, 0)
    after = -(before + len(values)) % height
    filled = torch.nn.functional.pad(of_rows, (0, 0, before, after))
    of_blocks = filled.view(-1, height, filled.shape[1]).amax(1)
    grid[first : first + len(of_blocks)] = of_blocks


def _spread(
    grid: Grid, block: tuple[int | None, int | None], part: _Part, values: torch.Tensor
) -> torch.Tensor:
    """The number of its block for every element of `values`."""
    of_rows = grid[_block_rows(block, part, values)]
    return of_rows.repeat_interleave(block[1] or part.columns, 1)[:, : part.columns]


def _block_rows(
    block: tuple[int | None, int | None], part: _Part, values: torch.Tensor
) -> torch.Tensor:
    rows = torch.arange(part.first_row, part.first_row + len(values), device=values.device)
    return rows // block[0] if block[0] is not None else torch.zeros_like(rows)


def _power_of_two(scale: Grid) -> Grid:
    """Rounded up."""
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # noqa: PLR2004 - frexp's least
    exponent = exponent.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.ldexp(torch.ones_like(scale), exponent)


def _as_bytes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _scale_elements(layout: Layout) -> int:
    """Scales of rows in the slice that has the most of them."""
    ends = [0] * layout.slices
    for part in range(layout.slices):
        for _, _, where in _scale_places(layout, part, 1, elements=0):
            ends[part] = where.stop
    return max(ends)


def _scale_places(
    layout: Layout, first_slice: int, slices: int, *, elements: int | None = None
) -> Iterator[tuple[int, slice, slice]]:
    """Matrix, its rows, and where in a payload over these slices their scales lie.

    Slice by slice, since every slice has as many elements; within one, matrix by matrix.
    """
    size = _scale_elements(layout) if elements is None else elements
    for number in range(slices):
        cursor = number * size
        for index, slot in enumerate(layout.slots):
            rows = layout.local_rows(index, first_slice + number)
            count = rows.rows * _grid(slot.shape, (1, 32))[1]
            if count:
                yield (
                    index,
                    slice(rows.first_row, rows.first_row + rows.rows),
                    slice(cursor, cursor + count),
                )
            cursor += count
