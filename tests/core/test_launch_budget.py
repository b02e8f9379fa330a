"""What a step launches on a device beside the model's own operations: a budget, counted on a CPU.

Operations that compute or copy, and collectives, of the core's third step less those of plain
torch; on torch's fake process group, as NCCL would be asked. A number rises only with a reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (0, 4)
#: What gives or shows memory, and launches nothing.
SILENT = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "set_", "resize_", "alias")
NARROW = MixedPrecisionPolicy(
    torch.float32, torch.float32, torch.bfloat16, reduce_dtype=torch.bfloat16
)


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in SILENT:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Unit(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def launches(units: int, parameters: int, options: dict[str, Any] | None) -> int:
    """Of a third step. options: of the core; None counts plain torch."""
    dtype = torch.bfloat16 if options and "mixed_precision_policy" in options else torch.float32
    module: Any = nn.Sequential(*(Unit(parameters) for _ in range(units))).to(dtype)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    if options is not None:
        module = fully_shard_model(module, fsdp_unit_modules=[Unit], transport="native", **options)
        sharded = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
        optimizer = fully_shard_optimizer(sharded)
    counter = Launches()
    for _ in range(3):
        with counter:
            counter.found.clear()
            module(torch.ones(2, 16, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(counter.found)


def own(units: int, parameters: int, options: dict[str, Any]) -> int:
    return launches(units, parameters, options) - launches(units, parameters, None)


CASES: dict[str, dict[str, Any]] = {
    "zero3": {"zero_dp_strategy": 3},
    "zero3 bf16": {"zero_dp_strategy": 3, "mixed_precision_policy": NARROW},
    "zero2": {"zero_dp_strategy": 2},
    "zero1": {"zero_dp_strategy": 1},
    "max pool": {"zero_dp_strategy": 3, "fsdp_double_buffer": True},
}
#: Launches of a step: for every parameter, which its gradient's scaled copy into the bucket is; for
#: every unit, its collectives, and casts where dtypes differ; besides.
BUDGET = {
    "zero3": (1, 3, 2),
    "zero3 bf16": (1, 6, 2),
    "zero2": (1, 2, 2),
    "zero1": (1, 2, 2),
    "max pool": (1, 3, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_launches_no_more_than_its_budget_per_parameter_and_unit(case: str) -> None:
    options = CASES[case]
    few, wide, deep = (own(u, p, options) for u, p in ((3, 2), (3, 5), (6, 2)))
    of_a_parameter = (wide - few) / (3 * 3)
    of_a_unit = (deep - few) / 3 - 2 * of_a_parameter
    besides = few - 3 * of_a_unit - 3 * 2 * of_a_parameter
    assert (of_a_parameter, of_a_unit, besides) == BUDGET[case]
