"""Training behind kernels that do nothing for a while, and how far weights are off. In a rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mfsdp_core import (
    CapturedStep,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import mesh
from oracle.reference import relative_difference, train
from oracle.sharded import Sharded

RANKS, MICROBATCHES, DTYPE = 2, 2, torch.float64
#: Settings that order work in ways of their own.
WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "messages": {"transport": "point_to_point"},
    "temporary": {"allocator": "temporary"},
    "fixed_pool": {"allocator": "fixed_pool"},
    "max_pool": {"allocator": "max_pool", "transport": "point_to_point"},
    "on_demand": {"overlap_param_gather": False},
    "by_module": {"enable_fine_grained_param_gather": True},
    "ranks_agree": {"unused_parameters": "none"},
    "average": {"average_in_collective": True},
}
#: About 10 ms of a kernel that does nothing.
_MOST_CYCLES = 20_000_000


@dataclass(frozen=True)
class Case:
    """options: of the model. captured: steps are replays in the end."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    toy: str = "linear_stack"
    captured: bool = False

    @property
    def steps(self) -> int:
        """Calls 1 to 4 of a captured step run, call 5 is captured, and replayed as the others."""
        return 7 if self.captured else 3


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Reads nothing on the host."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def behind_slow_kernels(case: Case, seed: int, device: str = "cuda") -> tuple[float, int]:
    """Relative difference of weights from plain torch's; kernels that stood in the way of others.

    One before every gather and reduction, on the stream that it waits for, and one after every
    layer, each as long as `seed` draws. On a CPU they take no time.
    """
    drawn, count = random.Random(seed), 0

    def hold_up(*_: Any) -> None:
        nonlocal count
        count += 1
        cycles = drawn.randrange(_MOST_CYCLES)
        if device == "cuda":
            torch.cuda._sleep(cycles)

    # The oracle counts a gradient that nobody has as zeros.
    usual = {"mixed_precision_policy": MixedPrecisionPolicy(DTYPE), "unused_parameters": "zero"}
    model = fully_shard_model(
        build(case.toy, DTYPE).to(device),
        device_mesh=mesh(RANKS)["dp"],
        fsdp_unit_modules=list(TOYS[case.toy].units),
        zero_dp_strategy=case.strategy,
        sync_model_each_microbatch=False,
        **(usual | case.options),
    )
    model.events.subscribe(hold_up, kinds=["collective"])
    for layer in model.module.modules():
        layer.register_forward_hook(hold_up)
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    step = _step(model, optimizer)
    if case.captured:
        step = CapturedStep(model, optimizer, step)
    rank = mesh(RANKS).get_local_rank("dp")
    for number in range(case.steps):
        inputs = (batch(case.toy, rank, j, DTYPE, number) for j in range(MICROBATCHES))
        step(*(one.to(device) for one in inputs))
    found = Sharded(case.toy, RANKS, DTYPE, model).full_parameters()
    expected = train(case.toy, RANKS, MICROBATCHES, case.steps, sgd)[0]
    return relative_difference(found, expected), count


def _step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(*batches: Tensor) -> Tensor:
        for number, inputs in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                value = loss(model(inputs))
                value.backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step
