"""torchrun --nproc-per-node 2 FILE: two GPUs; a weight of a unit takes no part."""

import torch
from megatron_fsdp import experimental as v2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2,))
torch.set_default_device(f"cuda:{mesh.get_rank()}")
unit = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
v2.fully_shard(unit, mesh, v2.Placements([0], [v2.Flat()], [v2.Flat()], [v2.Flat()]))
sharded = dict(unit.named_parameters())
unit.forward = lambda x: unit["used"](x).square().mean()
unit(torch.ones(2, 4)).backward()
print({name: parameter.grad is None for name, parameter in sharded.items()})
