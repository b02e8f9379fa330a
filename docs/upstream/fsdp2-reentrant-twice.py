"""torchrun --nproc-per-node 2 FILE: a unit that runs twice under reentrant checkpointing."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

torch.distributed.init_process_group("gloo")
for reentrant in (False, True):  # the gradient has to be the same; the weights are equal
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), fully_shard(nn.Linear(4, 4)))
    weight = model[1].weight  # the shard
    run = lambda x: checkpoint(model[1], x.relu(), use_reentrant=reentrant)
    model.forward = lambda x: run(run(model[0](x))).square().mean()
    model = fully_shard(model)
    model(torch.ones(2, 4)).backward()
    print(f"use_reentrant={reentrant}:", weight.grad.full_tensor().abs().max())
