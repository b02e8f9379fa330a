"""The gradient that the optimizer is handed is the mean over ranks of the sum over microbatches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, STYLES, shard

pytestmark = pytest.mark.processes

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def gradient_errors(
    name: str, strategy: str, group_size: int, dtype: torch.dtype, style: str
) -> dict[int, float]:
    """Relative difference by number of microbatches, each with a fresh model."""
    errors = {}
    for microbatches in (1, 2, 3, 4):
        toy = shard(name, strategy, group_size, dtype)
        toy.run_cycle(microbatches, style=style)
        expected = expected_gradient(name, group_size, microbatches, dtype)
        errors[microbatches] = relative_difference(toy.full_gradient(), expected)
    return errors


def errors_of_three_cycles(name: str, strategy: str, group_size: int) -> list[float]:
    toy = shard(name, strategy, group_size, torch.float64)
    errors = []
    for cycle in (0, 1, 2):
        toy.run_cycle(2, cycle)
        expected = expected_gradient(name, group_size, 2, torch.float64, cycle)
        errors.append(relative_difference(toy.full_gradient(), expected))
        toy.model.zero_grad_buffer()
    return errors


def error_with(arguments: dict[str, Any], strategy: str, group_size: int, divisor: float) -> float:
    """Gradient error where half the sum over ranks is expected divided by `divisor`."""
    toy = shard("root_owned", strategy, group_size, torch.float64, **arguments)
    toy.run_cycle(3)
    toy.model.scale_gradients(0.5)
    expected = expected_gradient("root_owned", group_size, 3, torch.float64)
    scaled = {key: value * group_size / divisor / 2 for key, value in expected.items()}
    return relative_difference(toy.full_gradient(), scaled)


def every_model() -> list[Any]:
    """Daily every model and every strategy on 2 ranks, some on 4, in fp64, which shows more.

    All strategies, one rank and fp32 daily for one model; the whole product nightly.
    """
    cases = []
    product = itertools.product(enumerate(TOYS), enumerate(STRATEGIES), GROUP_SIZES)
    for (i, name), (j, strategy), size in product:
        whole = name == "conv_linear"
        of_four = (i + j) % 2 if whole else (i + j) % 4 == 3
        in_turn = size == (4 if of_four else 2) and (whole or (i + j // 2) % 2)
        for dtype in (torch.float64, torch.float32):
            daily = in_turn if dtype == torch.float64 else whole and size == 2
            daily = daily or (whole and size == 1 and dtype == torch.float64)
            case = f"{name}-{strategy}-{size}-{str(dtype).removeprefix('torch.')}"
            marks = [] if daily else [pytest.mark.nightly]
            cases.append(pytest.param(name, strategy, size, dtype, id=case, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "strategy", "group_size", "dtype"), every_model())
def test_gradients_agree_with_the_reference_for_one_to_four_microbatches(
    ranks: RankPool, name: str, strategy: str, group_size: int, dtype: torch.dtype
) -> None:
    for errors in ranks.run(gradient_errors, name, strategy, group_size, dtype, "no_sync"):
        assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.sample
@pytest.mark.parametrize("style", [style for style in STYLES if style != "no_sync"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_mark_the_last_microbatch_gives_the_same_gradient(
    ranks: RankPool, strategy: str, style: str
) -> None:
    for errors in ranks.run(gradient_errors, "linear_stack", strategy, 2, torch.float64, style):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.sample
@pytest.mark.parametrize("group_size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "root_owned"])
def test_cycles_separated_by_zero_grad_are_independent(
    ranks: RankPool, name: str, strategy: str, group_size: int
) -> None:
    for errors in ranks.run(errors_of_three_cycles, name, strategy, group_size):
        assert max(errors) <= 1e-12, errors


@pytest.mark.sample
@pytest.mark.parametrize(
    ("switch", "value", "divisor"),
    [
        ("overlap_param_gather", False, 2),
        ("average_in_collective", True, 2),
        ("calculate_per_token_loss", True, 1),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_switches_of_schedule_and_averaging_give_the_promised_gradient(
    ranks: RankPool, strategy: str, switch: str, value: bool, divisor: float
) -> None:
    assert max(ranks.run(error_with, {switch: value}, strategy, 2, divisor)) <= 1e-12


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_reduction_after_the_backward_pass_gives_the_same_gradient(
    ranks: RankPool, strategy: str
) -> None:
    arguments = {"overlap_grad_reduce": False}
    assert max(ranks.run(error_with, arguments, strategy, 2, 2.0)) <= 1e-12
