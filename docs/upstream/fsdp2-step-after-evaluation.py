"""torchrun --nproc-per-node 2 FILE: an evaluation between the backward pass and the step."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("gloo")
for evaluates in (False, True):  # the losses have to be the same
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), fully_shard(nn.Linear(4, 4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if evaluates:  # gathers the root's weights, which stay
            model(torch.ones(2, 4))
        optimizer.step()  # of the shards
        optimizer.zero_grad()
        print(f"evaluates={evaluates}: {loss.item():.4f}")
