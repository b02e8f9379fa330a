"""torchrun --nproc-per-node 2 FILE: BF16, ZeRO stage 1, gradients accumulated in FP32."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone, no compiler
deepspeed.init_distributed("gloo")
rank, steps = dist.get_rank(), 2
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": steps,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_allow_untested_optimizer": True,
}
model = torch.nn.Linear(4, 4, bias=False).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for index in range(steps):  # inputs 1 and 11 on rank 0, 2 and 12 on rank 1: the mean is 6.5
    x = torch.full((1, 4), 1.0 + rank + 10 * index, dtype=torch.bfloat16)
    engine.backward(engine(x).sum())
    if index == steps - 1:
        found = safe_get_full_grad(model.weight).unique().tolist()
        print(f"DeepSpeed {deepspeed.__version__}, rank {rank}: expected 6.5, found {found}")
    engine.step()
