"""The mean over ranks is taken while a gradient is copied into a bucket of another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model

pytestmark = pytest.mark.usefixtures("fake_group")
#: A third has no exact value.
FAKE = (1, 3)

F32, B16 = torch.float32, torch.bfloat16
WHOLE = ("no_shard", "optim")
SLICED = ("optim_grads", "optim_grads_params")


class Passes(TorchDispatchMode):
    """Operations that write tensors of `elements` elements, and what the first wrote."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.found, self.written = elements, [], None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if writes and isinstance(result, torch.Tensor) and result.numel() == self.elements:
            self.found.append(func._schema.name)
            self.written = result.clone() if self.written is None else self.written
        return result


def sharded(strategy, compute, wire, rows=3):
    torch.manual_seed(0)
    plain = nn.Linear(4, rows, bias=False).to(compute)
    policy = MixedPrecisionPolicy(main_grads_dtype=F32, grad_comm_dtype=wire)
    model = fully_shard_model(
        nn.Sequential(plain), zero_dp_strategy=strategy, mixed_precision_policy=policy
    )
    (group,) = model._buckets()
    return group.gradients


@pytest.mark.parametrize("strategy", WHOLE)
def test_a_whole_accumulator_is_scaled_on_its_way_into_a_narrower_bucket(strategy):
    gradients = sharded(strategy, F32, B16)
    gradient = torch.randn(3, 4)
    gradients.accumulate(0, gradient)
    with Passes(gradient.numel()) as seen:
        gradients.issue(is_last=True)
    assert torch.equal(seen.written.view(3, 4), (gradient * (1 / 3)).to(B16))
    assert seen.found == ["aten::mul"]


class Kernels(TorchDispatchMode):
    """Operations that compute something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(
            one.alias_info and not one.alias_info.is_write for one in func._schema.returns
        )
        name = func._schema.name
        if not is_view and name not in {"aten::empty", "aten::promote_types"}:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtypes", [(B16, F32), (F32, B16)])
@pytest.mark.parametrize("strategy", [*WHOLE, *SLICED])
def test_a_gradient_is_one_kernel_whatever_the_dtypes_and_the_padding(strategy, dtypes):
    """From the second pass on: 4 rows on 3 ranks, of which 2 slices are padding."""
    compute, wire = dtypes
    gradients = sharded(strategy, compute, wire, rows=4)
    for _ in range(2):
        gradients.reset()
        with Kernels() as seen:
            gradients.accumulate(0, torch.ones(4, 4, dtype=compute))
    whole = strategy in WHOLE
    assert seen.found[1:] == ["aten::copy_" if whole else "aten::mul"]
