"""Where a shard lies in its whole tensor, and how torch.distributed.checkpoint learns it.

[Note: analytic chunks] The flat layout says which rows a rank holds, so nobody has to ask the other
ranks. torch's checkpoint planner would compute the rows of an uneven shard as if it were even, and
write them to wrong places without an error; it asks the local tensor first, and that is where the
answer is put. A deep copy keeps the answer. A shard that was detached, or computed from a described
one, as optimizer state is, knows the rows of every rank along one axis; over several axes it has no
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

#: Attribute of a sharded parameter: index of its shard's first element in every dim of the whole.
OFFSETS = "_mfsdp_offsets"

Offsets = tuple[int, ...]


def remember_offsets(parameter: torch.Tensor, offsets: Offsets) -> None:
    """Note on a sharded parameter where its shard begins; its optimizer state begins there too."""
    setattr(parameter, OFFSETS, offsets)


def offsets_of(parameter: torch.Tensor) -> Offsets | None:
    """Where the shard of a parameter begins; None for a tensor that this package did not shard."""
    found: Offsets | None = getattr(parameter, OFFSETS, None)
    return found


def describe_chunk(shard: DTensor, offsets: Offsets) -> None:
    """Tell torch.distributed.checkpoint that `shard` begins at `offsets`; no communication.

    An empty shard of a tensor that has elements is neither written nor read. The description is
    not pickled.
    """
    local: Any = shard._local_tensor  # to_local() may return an alias, which torch never asks
    chunk = _Chunk(tuple(shard.shape), offsets, tuple(local.shape))
    local.__create_chunk_list__ = chunk.chunk_list
    local.__create_write_items__ = chunk.write_items
    local.__getstate__ = _no_state


def describe_like(value: object, parameter: torch.Tensor) -> None:
    """Describe `value` if it is sharded as `parameter` is: its gradient or optimizer state."""
    offsets = offsets_of(parameter)
    if offsets is not None and isinstance(value, DTensor) and value.shape == parameter.shape:
        describe_chunk(value, offsets)


def described_offsets(shard: DTensor) -> Offsets | None:
    """What `describe_chunk` has said of this very object; None if nothing."""
    method = getattr(shard._local_tensor, "__create_chunk_list__", None)
    chunk = getattr(method, "__self__", None)
    return chunk.offsets if isinstance(chunk, _Chunk) else None


@dataclass(frozen=True)
class _Chunk:
    """A box of `sizes` at `offsets` of a tensor of `shape`."""

    shape: tuple[int, ...]
    offsets: Offsets
    sizes: tuple[int, ...]

    @property
    def _is_skipped(self) -> bool:
        return not prod(self.sizes) and bool(prod(self.shape))

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self._is_skipped:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))]

    def write_items(self, name: str, value: torch.Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(name, torch.Size(self.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties(dtype=value.dtype), torch.Size(self.shape)
                ),
            )
            for chunk in self.chunk_list()
        ]


def _no_state() -> None:
    """What a described tensor pickles besides its values: nothing."""
