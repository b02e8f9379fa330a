"""torchrun --nproc-per-node 2 FILE: static_graph, and the first pass under no_sync raises."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
with model.no_sync():  # gradient accumulation: the first of two microbatches
    model(torch.ones(1, 2)).sum().backward()
model(torch.ones(1, 2)).sum().backward()
