"""How the tests wrap a model, and where its weights are."""

import torch.distributed as dist
from my_fsdp import shard

from bench.engines.inspection import LocalRows
from bench.validate.adapters import from_callable


def shards(wrapped):
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for name, shape in wrapped.shapes.items():
        part = wrapped.parts[name.replace(".", "/")]
        kept = max(0, min(len(part), shape.numel() - rank * len(part)))  # without padding

        def rows(tensor, kept=kept):
            return None if tensor is None else LocalRows(tensor[:kept], rank, ranks, flat=True)

        found[name] = rows(part.detach()), rows(part.grad)
    return found


engine = from_callable(shard, shards=shards)
