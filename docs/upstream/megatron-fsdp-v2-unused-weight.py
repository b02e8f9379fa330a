"""torchrun --nproc-per-node 2 FILE: a weight of a unit takes no part. Without CUDA, streams do nothing."""

import contextlib
from types import SimpleNamespace as Twin

import torch
import torch.distributed as dist
from megatron_fsdp import experimental as v2
from megatron_fsdp.experimental import dbuffer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cpu":

    def mean_scatter(output, input, op, group):
        dist.reduce_scatter_tensor(output, input / group.size(), group=group)

    def stream(*_):
        return Twin(wait_stream=id, wait_event=id, record_event=stream, device=None)

    torch.cuda.Stream = torch.cuda.current_stream = stream
    torch.cuda.stream = torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    gather = dist.all_gather_into_tensor
    dbuffer.dist = Twin(all_gather_into_tensor=gather, reduce_scatter_tensor=mean_scatter)
    dbuffer.dist.ReduceOp = dist.ReduceOp
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
torch.set_default_device(f"cuda:{dist.get_rank()}" if kind == "cuda" else "cpu")
unit = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
flat = [v2.Flat()]
v2.fully_shard(unit, init_device_mesh(kind, (2,)), v2.Placements([0], flat, flat, flat))
sharded = dict(unit.named_parameters())
unit.forward = lambda x: unit["used"](x).square().mean()
unit(torch.ones(2, 4)).backward()
for name, parameter in sharded.items():
    print(dist.get_rank(), name, "None" if parameter.grad is None else "a gradient")
dist.destroy_process_group()
