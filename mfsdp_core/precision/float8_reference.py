"""FP8 weights in plain torch, as a codec that runs wherever torch does.

The table of `mfsdp_core.plan.recipes` has the recipes; this runs them.

A matrix is [shape[0], the rest]; blocks at its edges are smaller. Codes are E4M3, a byte each. The
maxima of blocks that a shard may cut are MAX-reduced over the ranks in FP32: every rank then knows
those scales. A block of a row is never cut, since shards are whole rows.

Codes are multiplied by the scale when they are decoded. It is maximum / 448 times 2^margin, under
mxfp8 rounded up to a power of two, so that only delayed scaling saturates; 1 for zeros. Main
weights are cast to the compute dtype before anything else. MXFP8 decodes rows for forward passes
and columns for backward ones; these are other values. Maxima of earlier steps are in no checkpoint:
delayed scaling starts anew after a load and after `broadcast_params`. Frozen weights are encoded
once, so under delayed scaling they keep a scale of 1.

Sources: Transformer Engine's documentation of its recipes; OCP Microscaling Formats 1.0 for E8M0.
This is no emulation of Transformer Engine's kernels, whose bits may differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from mfsdp_core.plan.layout import Layout, Rows
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.plan.recipes import CODES, VALUES, Codes, QuantisedWeights, most_in_a_slice
from mfsdp_core.precision.codec import BucketCodec, Shard

Grid = torch.Tensor

#: Largest finite E4M3 number.
LARGEST = 448.0
_E8M0_BIAS = 127
#: Exponents of scales that FP32 represents without loss.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127


@dataclass(frozen=True)
class Float8Reference(QuantisedWeights):
    """A `Codec` of matrices; vectors travel as they are.

    margin: powers of two of headroom. history: steps whose maxima delayed scaling looks back at.

    Raises:
        ConfigurationError: an unknown recipe.
    """

    margin: int = 0
    history: int = 16

    def for_bucket(self, shard: Shard) -> BucketCodec:
        """The codec of one bucket, which keeps its scales."""
        return _Bucket(self, shard)


class _Bucket:
    """Codes and scales of one bucket."""

    def __init__(self, recipe: Float8Reference, shard: Shard) -> None:
        self._recipe = recipe
        self._shard = shard
        self._maxima: deque[torch.Tensor] = deque(maxlen=recipe.history)
        self._all_codes = CODES[recipe.recipe]
        self._scales: dict[str, list[Grid]] = {}

    def encode(self, main: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's codes, and the scales that travel; or its weights."""
        values = main.to(self._shard.compute)
        if VALUES in parts:
            parts[VALUES].copy_(values)
        for codes in self._all_codes:
            scales = self._scales_of(values, codes)
            if codes.payload in parts:
                for part in self._own():
                    part.of(parts[codes.payload]).copy_(
                        self._quantised(part, values, scales, codes)
                    )
            if codes.scales is None:
                self._scales[codes.payload] = scales
            elif codes.scales in parts:
                self._send(scales, parts[codes.scales])

    def forget(self) -> None:
        """Delayed scaling starts anew; ranks had different maxima where they had other weights."""
        self._maxima.clear()

    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Codes times scales. Weights that have arrived as such are made into codes first."""
        layout = self._shard.layout
        for codes in self._all_codes:
            if direction not in codes.directions:
                continue
            values = gathered.get(VALUES)
            if codes.scales is None:
                scales = self._scales[codes.payload]
            else:
                scales = self._received(gathered[codes.scales])
            for part in layout.all_in(range(layout.slices)):
                if values is None:
                    found = part.of(gathered[codes.payload])
                else:
                    found = self._quantised(part, values, scales, codes)
                numbers = found.view(torch.float8_e4m3fn).float()
                scale = _spread(scales[part.index], codes.block, part, numbers)
                part.of(weights).copy_(numbers * scale)

    def _quantised(
        self, part: Rows, values: torch.Tensor, scales: list[Grid], codes: Codes
    ) -> torch.Tensor:
        """Codes of the rows of `part` in `values`, uint8."""
        scale = _spread(scales[part.index], codes.block, part, part.of(values))
        rows: torch.Tensor = part.of(values)
        scaled = (rows.float() / scale).clamp_(-LARGEST, LARGEST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _own(self) -> Iterator[Rows]:
        first = self._shard.first_slice
        return self._shard.layout.all_in(range(first, first + self._shard.slices))

    def _scales_of(self, values: torch.Tensor, codes: Codes) -> list[Grid]:
        """Scales of all blocks; of blocks in rows of other ranks only where no scale travels."""
        sizes = [_grid(slot.shape, codes.block) for slot in self._shard.layout.slots]
        counts = [*map(prod, sizes)]
        flat = torch.zeros(sum(counts), device=values.device)
        grids = [g.view(s) for g, s in zip(flat.split(counts), sizes, strict=True)]
        for part in self._own():
            _enter_maxima(grids[part.index], codes.block, part, part.of(values))
        if codes.scales is None:
            self._shard.reduce_max(flat)
        if self._recipe.recipe == "delayed":
            earlier = [*self._maxima]
            self._maxima.append(flat.clone())
            # No step before: a scale of 1, which is what maxima of 448 without headroom give.
            flat.copy_(torch.stack(earlier).amax(0) if earlier else torch.zeros_like(flat))
        return [self._scale(grid) for grid in grids]

    def _scale(self, maxima: Grid) -> Grid:
        scale = torch.where(maxima > 0, maxima / LARGEST * 2.0**self._recipe.margin, 1.0)
        return _power_of_two(scale) if self._recipe.recipe == "mxfp8" else scale

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


def _grid(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, int]:
    """Blocks of a matrix along its rows and its columns."""
    extents = shape[0], prod(shape[1:])
    rows, columns = (1 if b is None else -(-e // b) for e, b in zip(extents, block, strict=True))
    return rows, columns


def _enter_maxima(
    grid: Grid, block: tuple[int | None, int | None], part: Rows, values: torch.Tensor
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
    grid: Grid, block: tuple[int | None, int | None], part: Rows, values: torch.Tensor
) -> torch.Tensor:
    """The number of its block for every element of `values`."""
    of_rows = grid[_block_rows(block, part, values)]
    return of_rows.repeat_interleave(block[1] or part.columns, 1)[:, : part.columns]


def _block_rows(
    block: tuple[int | None, int | None], part: Rows, values: torch.Tensor
) -> torch.Tensor:
    rows = torch.arange(part.first_row, part.first_row + len(values), device=values.device)
    return rows // block[0] if block[0] is not None else torch.zeros_like(rows)


def _power_of_two(scale: Grid) -> Grid:
    """Rounded up."""
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # noqa: PLR2004 - frexp's least
    exponent = exponent.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.ldexp(torch.ones_like(scale), exponent)


def _scale_places(
    layout: Layout, first_slice: int, slices: int
) -> Iterator[tuple[int, slice, slice]]:
    """Matrix, its rows, and where in a payload over these slices their scales lie.

    Slice by slice, since every slice has as many elements; within one, matrix by matrix.
    """
    size = most_in_a_slice(layout, 32)
    for number in range(slices):
        cursor = number * size
        for rows in layout.all_in(range(first_slice + number, first_slice + number + 1)):
            count = rows.rows * -(-rows.columns // 32)
            last = rows.first_row + rows.rows
            yield rows.index, slice(rows.first_row, last), slice(cursor, cursor + count)
            cursor += count
