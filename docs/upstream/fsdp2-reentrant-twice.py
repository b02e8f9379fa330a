"""torchrun --nproc-per-node 2 FILE: a unit that runs twice under reentrant checkpointing."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unit = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.unit, x.relu(), use_reentrant=True)
        return x.square().mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
plain = copy.deepcopy(model)
fully_shard(model.unit)
fully_shard(model)
weight = model.unit.weight  # the shard, which an optimizer has
x = torch.ones(2, 4)  # the same on both ranks, so the mean over ranks is the gradient of one
model(x).backward()
plain(x).backward()
expected, found = plain.unit.weight.grad, weight.grad.full_tensor()
print(f"torch {torch.__version__}: largest {expected.abs().max():.4f},", end=" ")
print(f"off by {(found - expected).abs().max():.4f}")
dist.destroy_process_group()
