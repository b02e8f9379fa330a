"""torchrun --nproc-per-node 4 FILE: HSDP, all-reduced with the last microbatch alone."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
model.forward = lambda x, branch: model[branch](x).square().mean()
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
for index in (0, 1):
    model.set_requires_all_reduce(index == 1)
    model(torch.full((2, 4), index + 1.0), index).backward()
for name, parameter in model.named_parameters():  # both have a gradient in plain torch
    print(name, None if parameter.grad is None else parameter.grad.full_tensor()[0, :2])
