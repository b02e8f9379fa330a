"""torchrun --nproc-per-node 2 FILE: static_graph, and the first pass under no_sync."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
try:
    with model.no_sync():  # gradient accumulation: the first of two microbatches
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    print(f"torch {torch.__version__}: fine")
except RuntimeError as error:
    print(f"torch {torch.__version__}: {str(error)[:110]}")
