"""Aborts now and then when the interpreter ends: run it some twenty times."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
for _ in range(5):
    model(torch.randn(8, 16)).sum().backward()
dist.destroy_process_group()
