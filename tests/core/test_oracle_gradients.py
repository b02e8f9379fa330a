"""The gradient that the optimizer is handed is the mean over ranks of the sum over microbatches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES
from oracle.reference import compare, expected_gradient
from oracle.sharded import STRATEGIES, STYLES, shard

pytestmark = pytest.mark.on_ranks

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


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
    name: str, strategy: str, group_size: int, dtype: torch.dtype
) -> None:
    for microbatches in (1, 2, 3, 4):
        toy = shard(name, strategy, group_size, dtype)
        toy.run_cycle(microbatches)
        toy.compare_gradient(microbatches, relative=TOLERANCE[dtype])


@pytest.mark.sample
@pytest.mark.parametrize("style", [style for style in STYLES if style != "no_sync"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_mark_the_last_microbatch_gives_the_same_gradient(
    strategy: str, style: str
) -> None:
    for microbatches in (1, 2, 3, 4):
        toy = shard("linear_stack", strategy, 2, torch.float64)
        toy.run_cycle(microbatches, style=style)
        toy.compare_gradient(microbatches)


@pytest.mark.sample
@pytest.mark.parametrize("group_size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "root_owned"])
def test_cycles_separated_by_zero_grad_are_independent(
    name: str, strategy: str, group_size: int
) -> None:
    toy = shard(name, strategy, group_size, torch.float64)
    for cycle in (0, 1, 2):
        toy.run_cycle(2, cycle)
        toy.compare_gradient(2, cycle)
        toy.model.zero_grad_buffer()


#: What half the sum over two ranks is divided by.
SWITCHES = [
    *(("overlap_param_gather", False, strategy, 2) for strategy in STRATEGIES),
    *(("average_in_collective", True, strategy, 2) for strategy in STRATEGIES),
    *(("calculate_per_token_loss", True, strategy, 1) for strategy in STRATEGIES),
    *(("overlap_grad_reduce", False, strategy, 2) for strategy in ("no_shard", "optim")),
]


@pytest.mark.sample
@pytest.mark.parametrize(("switch", "value", "strategy", "divisor"), SWITCHES)
def test_switches_of_schedule_and_averaging_give_the_promised_gradient(
    switch: str, value: bool, strategy: str, divisor: float
) -> None:
    toy = shard("root_owned", strategy, 2, torch.float64, **{switch: value})
    toy.run_cycle(3)
    toy.model.scale_gradients(0.5)
    expected = expected_gradient("root_owned", 2, 3, torch.float64)
    compare(toy.full_gradient(), {key: mean / divisor for key, mean in expected.items()})
