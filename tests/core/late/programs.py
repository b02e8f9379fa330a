"""Training on the late device, and how far its weights are from what they should be. In a rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from late.device import LateDevice
from late.group import late_axes, late_mesh
from late.operations import late_device
from mfsdp_core import (
    CapturedStep,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.shard.dtensor import local_tensor
from oracle.hybrid import Hybrid
from oracle.models import TOYS, Block, batch, build, loss
from oracle.ranks import WORLD, mesh
from oracle.reference import Named, relative_difference, train
from oracle.sharded import Sharded

MICROBATCHES = 2
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
_EXACT = MixedPrecisionPolicy(main_params_dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """ranks: two by two where there is an `outer` strategy. options: of the model.

    gathers_ahead: before every optimizer step, which has to wait for them.
    """

    strategy: str
    outer: str = ""
    toy: str = "linear_stack"
    options: dict[str, Any] = field(default_factory=dict)
    captured: bool = False
    steps: int = 3
    dtype: torch.dtype = torch.float64
    ranks: int = 2
    clip_norm: float | None = None
    gathers_ahead: bool = False

    def __post_init__(self) -> None:
        if self.outer:
            object.__setattr__(self, "ranks", WORLD)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Reads nothing on the host."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def from_oracle(case: Case, seed: int) -> float:
    """Relative difference of the weights from those of plain torch."""
    return relative_difference(trained(case, seed), _expected(case))


def from_punctual(case: Case, seed: int) -> float:
    """Relative difference of the weights from those of the same program over work in time."""
    return relative_difference(trained(case, seed), trained(case, None))


def unordered_steps(case: Case, seed: int) -> list[str]:
    """Streams that may still use main weights when an optimizer step writes them."""
    found: list[str] = []
    trained(case, seed, found)
    return found


def trained(case: Case, seed: int | None, unordered: list[str] | None = None) -> Named:
    """Weights after training; seed: of the order in which late work is done, None for gloo's.

    unordered: is given what `unordered_steps` answers.
    """
    axes, both = late_axes() if case.outer else (late_mesh(case.ranks), None)
    module = build(case.toy, case.dtype)
    with nullcontext() if seed is None else late_device(seed) as device:
        toy = _sharded(module, case, axes, both)
        if unordered is not None and device is not None:
            _train(toy, case, before_step=partial(_note_unordered, device, unordered))
        else:
            _train(toy, case)
    return toy.full_parameters()


def outputs_before_a_change(case: Case, seed: int | None) -> Tensor:
    """Of a pass without a graph, behind which the host writes other weights at once."""
    axes = late_mesh(case.ranks)
    inputs = batch(case.toy, 0, 0, case.dtype, 0)
    with nullcontext() if seed is None else late_device(seed), torch.no_grad():
        model = _sharded(build(case.toy, case.dtype), case, axes, None).model
        weights = [local_tensor(parameter) for parameter in model.parameters()]
        for weight in weights:
            weight.mul_(1.5)
        outputs: Tensor = model(inputs)
        for weight in weights:
            weight.zero_()
    return outputs


def host_waits(strategy: str, seed: int) -> tuple[list[int], list[str]]:
    """What the host has waited for the device, of which each rank leaves a parameter out.

    After a backward pass, after the step behind it, and after those of the second step; and the
    parameters that have no gradient after the first backward pass, as the host reads it at its end.
    """
    with late_device(seed) as device:
        toy = _sharded(_Sides().double(), Case(strategy, options=_ASKS), late_mesh(2), None)
        optimizer = fully_shard_optimizer(sgd(toy.model.parameters()))
        waits: list[int] = []
        wait = device.synchronize

        def synchronize(*streams: Any) -> None:
            count[0] += 1
            wait(*streams)

        device.synchronize = synchronize  # type: ignore[method-assign]
        count = [0]
        for _ in range(2):
            toy.model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            toy.model.finish_grad_sync()
            waits.append(count[0])
            optimizer.step()
            waits.append(count[0])
            found = [name for name, p in toy.model.named_parameters() if p.grad is None]
            optimizer.zero_grad()
    return waits, found


_ASKS: dict[str, Any] = {"unused_parameters": "none"}


class _Sides(nn.Module):
    """Each rank of two goes by another side, and none by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.sides = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        side = self.sides[dist.get_rank() % 2]
        return self.first(x) + side(x)


def _note_unordered(
    device: LateDevice, found: list[str], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    weights = [local_tensor(p) for group in optimizer.param_groups for p in group["params"]]
    found += device.unordered(map(device.beneath, weights))


def behind_slow_kernels(case: Case, seed: int, device: str = "cuda") -> tuple[float, int]:
    """As `from_oracle`, on two devices; and how many kernels stood in the way of others.

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

    axes = mesh(case.ranks)["dp"]
    toy = _sharded(build(case.toy, case.dtype).to(device), case, axes, None)
    toy.model.events.subscribe(hold_up, kinds=["collective"])
    for layer in toy.model.module.modules():
        layer.register_forward_hook(hold_up)
    _train(toy, case, device)
    return relative_difference(toy.full_parameters(), _expected(case)), count


def _expected(case: Case) -> Named:
    clip, dtype = case.clip_norm, case.dtype
    shape = (case.toy, case.ranks, MICROBATCHES, case.steps)
    return train(*shape, sgd, clip_norm=clip, dtype=dtype)[0]


def _train(
    toy: Sharded,
    case: Case,
    device: str = "cpu",
    before_step: Callable[..., None] | None = None,
) -> None:
    optimizer = fully_shard_optimizer(sgd(toy.model.parameters()))
    if before_step is not None:
        optimizer.register_step_pre_hook(before_step)
    step: Any = _step(toy.model, optimizer, case)
    if case.captured:
        step = CapturedStep(toy.model, optimizer, step)
    rank = dist.get_rank() % case.ranks
    for number in range(case.steps):
        inputs = (batch(case.toy, rank, j, case.dtype, number) for j in range(MICROBATCHES))
        step(*(one.to(device) for one in inputs))


def _step(model: Any, optimizer: torch.optim.Optimizer, case: Case) -> Callable[..., Tensor]:
    def step(*batches: Tensor) -> Tensor:
        for number, inputs in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                value = loss(model(inputs))
                value.backward()
        model.finish_grad_sync()
        if case.clip_norm is not None:
            clip_grad_norm_(model, case.clip_norm)
        if case.gathers_ahead:
            model.start_param_sync()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _sharded(module: nn.Module, case: Case, axes: Any, both: Any) -> Sharded:
    where: dict[str, Any] = {"device_mesh": axes, "dp_shard_dim": "inner" if case.outer else "dp"}
    if case.outer:
        where |= {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": case.outer}
        where["hybrid_fsdp_group"] = both
    # The oracle counts a gradient that nobody has as zeros.
    usual = {"mixed_precision_policy": _EXACT, "unused_parameters": "zero"}
    model = fully_shard_model(
        module,
        fsdp_unit_modules=list(TOYS[case.toy].units),
        zero_dp_strategy=case.strategy,
        sync_model_each_microbatch=False,
        **(usual | where | case.options),
    )
    if case.outer:
        shards = case.strategy != "no_shard", case.outer == "optim"
        return Hybrid(case.toy, WORLD, case.dtype, model, WORLD // 2, *shards)
    return Sharded(case.toy, case.ranks, case.dtype, model)
