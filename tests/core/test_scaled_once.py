"""The mean over ranks is taken while a gradient is copied into its bucket, a wider one too."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model

FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)


@pytest.fixture(autouse=True)
def fake_group():
    """Three ranks: a third has no exact FP32 value."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


class Multiplications(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mul_", "aten::mul") and result.dtype == torch.float32:
            self.found[func._schema.name + "." + func._schema.overload_name] += 1
        return result


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_bf16_gradient_is_scaled_on_its_way_into_an_fp32_bucket(strategy):
    torch.manual_seed(0)
    plain = nn.Linear(4, 3, bias=False).bfloat16()
    model = fully_shard_model(
        nn.Sequential(plain), zero_dp_strategy=strategy, mixed_precision_policy=FP32
    )
    (group,) = model._groups()
    gradient = torch.randn(3, 4).bfloat16()
    with Multiplications() as seen:
        group.gradients.accumulate(0, gradient)
    bucket = group.gradients._open_bucket().tensor(0)
    assert torch.equal(bucket, gradient.float().mul_(1 / 3))
    assert seen.found == {"aten::mul.out": 1}
