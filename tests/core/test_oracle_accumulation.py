"""Microbatches, synchronisation and the cycle: when gradients travel, appear and disappear."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from mfsdp_core.errors import GradAlreadyReducedError
from oracle.models import Block, build
from oracle.ranks import RankPool, mesh
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"
WHOLE_GRADIENT = ("no_shard", "optim")


def operations(counts: Counter[tuple[str, str]]) -> Counter[str]:
    by_operation: Counter[str] = Counter()
    for (operation, _), number in counts.items():
        by_operation[operation] += number
    return by_operation


def reductions_inside_no_sync(strategy: str) -> int:
    toy = shard(NAME, strategy, 2)
    with toy.collectives() as counts, toy.model.no_sync():
        toy.backward()
    toy.model.finish_grad_sync()
    return operations(counts)["all_reduce"] + operations(counts)["reduce_scatter"]


def presence_of_gradients(strategy: str) -> list[bool]:
    """Whether `.grad` is there: after a backward, after the finish, after zero_grad."""
    toy = shard(NAME, strategy, 2)

    def present() -> bool:
        there = {p.grad is not None for _, p in toy.parameters()}
        assert len(there) == 1
        return there.pop()

    toy.model.set_model_auto_sync(False)
    toy.backward()
    seen = [present()]
    toy.model.finish_grad_sync()
    seen.append(present())
    toy.model.zero_grad_buffer()
    return [*seen, present()]


def after_the_error(strategy: str) -> float:
    """Gradient error of a cycle that follows a refused one and a `zero_grad_buffer`."""
    toy = shard(NAME, strategy, 2, torch.float64)
    toy.run_cycle(1)
    with pytest.raises(GradAlreadyReducedError):
        toy.run_cycle(1)
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 1)
    return relative_difference(toy.full_gradient(), expected)


def error_after_a_failure(strategy: str, phase: str) -> float:
    """Gradient error of a cycle that follows a pass in which a hook of the second unit raised."""
    toy = shard(NAME, strategy, 2, torch.float64)

    def fail(*_: Any) -> None:
        raise ArithmeticError(phase)

    def fail_backward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    unit = toy.model.module.blocks[1]
    hook = unit.register_forward_hook(fail if phase == "forward" else fail_backward)
    with pytest.raises(ArithmeticError):
        toy.backward()
    hook.remove()
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 1)
    return relative_difference(toy.full_gradient(), expected)


def error_with_evaluation_between(strategy: str) -> float:
    """Forward passes without gradients, and one whose loss is never used, between microbatches."""
    toy = shard(NAME, strategy, 2, torch.float64)
    with toy.model.no_sync():
        toy.backward(0)
        with torch.no_grad():
            toy.forward(5)
        toy.forward(6)
    toy.backward(1)
    toy.model.finish_grad_sync()
    expected = expected_gradient(NAME, 2, 2, torch.float64)
    return relative_difference(toy.full_gradient(), expected)


def finished_by_backward_alone() -> list[bool]:
    """Whether a backward pass finishes the gradient: inside and after `sync`, by prior state."""
    toy = shard(NAME, 3, 2)
    finished = []

    def note() -> None:
        toy.backward()
        finished.append(all(p.grad is not None for _, p in toy.parameters()))
        toy.model.zero_grad_buffer()

    for before in (False, True):
        toy.model.set_model_auto_sync(before)
        with toy.model.sync():
            note()
        note()
    return finished


def plain_loop(strategy: str) -> tuple[list[float], float]:
    """The loop of a user who changed only the import: losses, and spread of weights over ranks."""
    module = build(NAME)
    model: Any
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        device_mesh=mesh(4),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
    )
    toy = Sharded(NAME, 4, torch.float32, model)
    losses = []
    for _ in range(8):
        losses.append(toy.backward())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(torch.ones(3, 6))
    outputs = [torch.empty_like(output) for _ in range(4)]
    torch.distributed.all_gather(outputs, output)
    return losses, max(float((other - output).abs().max()) for other in outputs)


def communication_peak_bytes(strategy: str, comm: torch.dtype) -> int:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm, reduce_dtype=comm)
    # Direct exchange needs memory for what arrives, whatever the dtypes.
    toy = shard(NAME, strategy, 2, mixed_precision_policy=policy, transport="native")
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=0.1))
    for cycle in range(2):
        toy.run_cycle(2, cycle)
        optimizer.step()
        optimizer.zero_grad()
    peaks: dict[str, int] = toy.model.ledger.peak_bytes_by_category()
    return peaks["communication_buffers"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sync_sends_no_gradient_where_it_can_be_kept_whole(
    ranks: RankPool, strategy: str
) -> None:
    expected = 0 if strategy in WHOLE_GRADIENT else 4
    assert ranks.run(reductions_inside_no_sync, strategy) == [expected] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_appear_when_the_cycle_is_finished_and_go_with_zero_grad(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(presence_of_gradients, strategy) == [[False, True, False]] * 4


@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_zero_grad_makes_a_model_usable_again_after_a_refused_reduction(
    ranks: RankPool, strategy: str
) -> None:
    assert max(ranks.run(after_the_error, strategy)) <= 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pass_that_raised_leaves_no_trace_after_zero_grad(
    ranks: RankPool, strategy: str, phase: str
) -> None:
    assert max(ranks.run(error_after_a_failure, strategy, phase)) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_between_microbatches_changes_no_gradient(
    ranks: RankPool, strategy: str
) -> None:
    assert max(ranks.run(error_with_evaluation_between, strategy)) <= 1e-12


def test_sync_restores_the_previous_state(ranks: RankPool) -> None:
    assert ranks.run(finished_by_backward_alone) == [[True, False, True, True]] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plain_training_loop_learns_and_keeps_ranks_identical(
    ranks: RankPool, strategy: str
) -> None:
    for losses, spread in ranks.run(plain_loop, strategy):
        assert losses[-1] < losses[0]
        assert spread == 0


@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_no_communication_buffer_exists_where_no_dtype_changes(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(communication_peak_bytes, strategy, torch.float32) == [0] * 4
    assert min(ranks.run(communication_peak_bytes, strategy, torch.bfloat16)) > 0
