# ruff: noqa: ARG002 - every codec has the same methods
"""Two codecs that no package has: all that it takes to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import Payload
from mfsdp_core.precision.codec import Shard


class Matrices:
    """Takes matrices; vectors travel as they are."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1


class ScaledBytes(Matrices):
    """One byte per weight, on a scale per tensor that all ranks share. The scales do not travel."""

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        return (Payload("codes", "uint8", layout.slice_elements),)

    def for_bucket(self, shard: Shard) -> _ScaledBucket:
        return _ScaledBucket(shard, torch.zeros(len(shard.layout.slots)))


@dataclass
class _ScaledBucket:
    shard: Shard
    largest: Tensor

    def encode(self, main: Tensor, parts: Mapping[str, Tensor]) -> None:
        layout, first = self.shard.layout, self.shard.first_slice
        low, high = (bound * layout.slice_elements for bound in (first, first + self.shard.slices))
        ranges = []
        self.largest.zero_()
        for index, slot in enumerate(layout.slots):
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                ranges.append((index, slice(start - low, end - low)))
                self.largest[index] = main[start - low : end - low].abs().max()
        self.shard.reduce_max(self.largest)
        for index, where in ranges:
            parts["codes"][where] = to_bytes(main[where], self.largest[index])

    def decode(self, direction: str, gathered: Mapping[str, Tensor], weights: Tensor) -> None:
        for index, slot in enumerate(self.shard.layout.slots):
            where = slice(slot.offset, slot.end)
            weights[where] = from_bytes(gathered["codes"][where], self.largest[index])

    def forget(self) -> None:
        pass  # every encoding takes the largest numbers anew


def to_bytes(values: Tensor, largest: Tensor) -> Tensor:
    """Integers from -127 to 127, moved up by 128."""
    return ((values.float() / largest * 127).round() + 128).to(torch.uint8)


def from_bytes(codes: Tensor, largest: Tensor) -> Tensor:
    """The inverse, up to rounding."""
    return (codes.float() - 128) / 127 * largest


class TwoPayloads(Matrices):
    """FP32 bit by bit: forward passes gather the bytes as they are, backward ones reversed."""

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        size = 4 * layout.slice_elements
        return (
            Payload("ahead", "uint8", size, frozenset({"forward"})),
            Payload("reversed", "uint8", size, frozenset({"backward"})),
        )

    def for_bucket(self, shard: Shard) -> TwoPayloads:
        return self

    def encode(self, main: Tensor, parts: Mapping[str, Tensor]) -> None:
        parts["ahead"].copy_(main.view(torch.uint8))
        parts["reversed"].copy_(~main.view(torch.uint8))

    def decode(self, direction: str, gathered: Mapping[str, Tensor], weights: Tensor) -> None:
        (payload,) = gathered.values()
        weights.copy_((payload if direction == "forward" else ~payload).view(torch.float32))

    def forget(self) -> None:
        pass


class DoubledBack(TwoPayloads):
    """Backward passes read weights twice as large: whoever reads the wrong payload is seen."""

    def decode(self, direction: str, gathered: Mapping[str, Tensor], weights: Tensor) -> None:
        super().decode(direction, gathered, weights)
        weights.mul_(1 if direction == "forward" else 2)
