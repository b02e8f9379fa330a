"""FP8 codes of shards, without ranks: threads stand for them, and a barrier for the reduction."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.testing.quantised import quantised
from mfsdp_core.plan.layout import Layout, build_layout
from mfsdp_core.plan.recipes import Recipe
from mfsdp_core.precision.codec import BucketCodec, Shard
from mfsdp_core.precision.float8_reference import Float8Reference

#: Blocks that are whole, that the edge cuts and that shards cut; a kernel; some shards are empty.
SHAPES = [(150, 300), (7, 40), (33, 5), (64, 2, 10)]
RECIPES: tuple[Recipe, ...] = ("delayed", "current", "block", "mxfp8")


class Shards:
    """One codec per shard of a bucket, encoding at once."""

    def __init__(self, recipe: Recipe, count: int, compute: torch.dtype) -> None:
        self.layout: Layout = build_layout(SHAPES, count)
        codec = Float8Reference(recipe)
        self.payloads = codec.payloads(self.layout, "bfloat16")
        self._barrier = threading.Barrier(count)
        self._waiting: dict[int, Tensor] = {}
        self.codecs: list[BucketCodec] = [
            codec.for_bucket(Shard(self.layout, compute, rank, 1, self._reduction(rank)))
            for rank in range(count)
        ]

    def _reduction(self, rank: int) -> Callable[[Tensor], None]:
        def reduce_max(values: Tensor) -> None:
            self._waiting[rank] = values
            self._barrier.wait()
            largest = torch.stack(list(self._waiting.values())).amax(0)
            self._barrier.wait()
            values.copy_(largest)
            self._barrier.wait()

        return reduce_max

    def encode(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The payloads as a gather would put them together; padding holds anything."""
        whole = torch.full((self.layout.total_elements,), 1e6)
        for slot, tensor in zip(self.layout.slots, tensors, strict=True):
            whole[slot.offset : slot.end] = tensor.flatten()
        count = len(self.codecs)
        full = {
            p.name: torch.full((p.slice_elements * count,), 77, dtype=torch.uint8)
            for p in self.payloads
        }
        threads = [
            threading.Thread(
                target=codec.encode,
                args=(whole.chunk(count)[rank], {k: v.chunk(count)[rank] for k, v in full.items()}),
            )
            for rank, codec in enumerate(self.codecs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return full


@pytest.mark.sample
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_decode_to_what_the_whole_tensor_does(
    recipe: Recipe, count: int, compute: torch.dtype
) -> None:
    shards = Shards(recipe, count, compute)
    generator = torch.Generator().manual_seed(3)
    history: list[list[Tensor]] = [[] for _ in SHAPES]
    for scale in (0.1, 1.0, 10.0, 0.0):
        tensors = [torch.randn(s, generator=generator) * scale for s in SHAPES]
        full = shards.encode(tensors)
        for direction in ("forward", "backward"):
            gathered = {p.name: full[p.name] for p in shards.payloads if direction in p.directions}
            for codec in (shards.codecs[0], shards.codecs[-1]):
                weights = torch.zeros(shards.layout.total_elements, dtype=compute)
                codec.decode(direction, gathered, weights)
                for slot, tensor, earlier in zip(
                    shards.layout.slots, tensors, history, strict=True
                ):
                    expected = quantised(
                        recipe, tensor, compute, earlier, backward=direction == "backward"
                    )
                    assert torch.equal(weights[slot.offset : slot.end].view(slot.shape), expected)
        for earlier, tensor in zip(history, tensors, strict=True):
            earlier.append(tensor)
