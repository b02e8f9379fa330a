"""torchrun --nproc-per-node 1 FILE: gradients in BF16 beside plain torch, by stage and linear layer.

DeepSpeed 0.19.8, torch 2.13.0, gloo. Stage 3 puts a linear layer of its own in the place of torch's.
"""

import copy
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone, no compiler
deepspeed.init_distributed("gloo")


def made(bias):
    """A model, its input and the gradients of plain torch: before DeepSpeed exchanges its layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias), nn.Tanh(), nn.Linear(64, 64, bias), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(64, 1, bias)).bfloat16()
    plain, x = copy.deepcopy(model), torch.randn(2, 4, 64).bfloat16()
    plain(x).float().square().mean().backward()
    return model, x, [p.grad for p in plain.parameters()]


def off(stage, own_linear, model, x, expected):
    zero = {"stage": stage} | ({"memory_efficient_linear": own_linear} if stage == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(x).float().square().mean())
    found = [safe_get_full_grad(p) for p in model.parameters()]
    pairs = zip(found, expected, strict=True)
    return max(((a.view(b.shape) - b).abs().max() / b.abs().max()).item() for a, b in pairs)


cases = [(2, False, True), (3, False, True), (3, True, False), (3, True, True)]
models = [made(bias) for _, _, bias in cases]
for (stage, own_linear, bias), model in zip(cases, models, strict=True):
    found = off(stage, own_linear, *model)
    print(f"stage {stage}, its own linear layer {own_linear}, bias {bias}: off by {found:.2%}")
