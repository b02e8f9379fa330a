"""torchrun --nproc-per-node 2 FILE, DS_ACCELERATOR=cpu: the mean is 6.5."""

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone, no compiler
deepspeed.init_distributed("gloo")
config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
config |= {"data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True}
model = torch.nn.Linear(4, 4, bias=False).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for first in (1.0, 11.0):  # inputs 1 and 11 on rank 0, 2 and 12 on rank 1
    x = torch.full((1, 4), first + torch.distributed.get_rank(), dtype=torch.bfloat16)
    engine.backward(engine(x).sum())
    found = deepspeed.utils.safe_get_full_grad(model.weight)
    engine.step()
print(f"DeepSpeed {deepspeed.__version__}, rank {engine.global_rank}: {found.unique().tolist()}")
