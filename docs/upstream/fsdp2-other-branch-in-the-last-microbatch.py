"""torchrun --nproc-per-node 4 FILE: HSDP, all-reduced with the last microbatch alone."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, branch):
        return getattr(self, branch)(x).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
plain = copy.deepcopy(model)
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
for index, branch in enumerate(("one", "two")):
    model.set_requires_all_reduce(index == 1)
    x = torch.full((2, 4), index + 1.0)  # the same on all ranks
    model(x, branch).backward()
    plain(x, branch).backward()
for name, parameter in model.named_parameters():
    found = None if parameter.grad is None else parameter.grad.full_tensor()[0, :2].tolist()
    if dist.get_rank() == 0:
        expected = plain.get_parameter(name).grad[0, :2].tolist()
        print(f"torch {torch.__version__}: {name} expected {expected}, found {found}")
dist.destroy_process_group()
