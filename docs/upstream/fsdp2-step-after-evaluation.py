"""torchrun --nproc-per-node 2 FILE: an evaluation between the backward pass and the step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def losses(sharded: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if sharded:
        fully_shard(model[1])
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(2, 4)  # the same on both ranks, so the mean over ranks is the gradient of one
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            model(x)  # gathers the root's weights, which stay
        optimizer.step()  # of the shards
        optimizer.zero_grad()
        found.append(f"{loss.item():.4f}")
    return found


dist.init_process_group("gloo")
plain, sharded = losses(False), losses(True)
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: plain {', '.join(plain)}; fully_shard {', '.join(sharded)}")
dist.destroy_process_group()
