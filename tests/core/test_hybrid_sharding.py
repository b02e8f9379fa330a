"""Hybrid sharding on two axes: HSDP (outer replicates) and HFSDP (outer shards the optimizer)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mfsdp_core import (
    clip_grad_norm_,
    fully_shard_optimizer,
    gather_full,
)
from mfsdp_core.errors import GradAlreadyReducedError
from oracle.hybrid import PAIRS, hybrid
from oracle.ranks import WORLD, RankPool
from oracle.reference import expected_gradient, relative_difference, train
from oracle.sharded import STRATEGIES, STYLES

pytestmark = pytest.mark.processes

NAME = "aligned_stack"
SHAPES = [(2, 2), (4, 1), (1, 4)]


def gathered_rows(inner: str, outer: str) -> bool:
    """Whether `gather_full` puts rows of weights and optimizer state where they belong (R13)."""
    toy = hybrid(inner, outer, name="conv_linear")
    optimizer = torch.optim.Adam(toy.model.parameters(), lr=0.01)
    fully_shard_optimizer(optimizer)
    toy.run_cycle(1)
    optimizer.step()
    wanted = toy.full_parameters()
    good = all(torch.equal(gather_full(p), wanted[key]) for key, p in toy.parameters())
    moments = {key: optimizer.state[p]["exp_avg"] for key, p in toy.parameters()}
    expected = toy._joined(moments)
    return good and all(torch.equal(gather_full(m), expected[key]) for key, m in moments.items())


def gradient_errors(
    inner: str, outer: str, shape: int, name: str, styles: tuple[str, ...] = STYLES
) -> list[float]:
    """Errors for 1 to 4 microbatches, in every one of `styles` to end a cycle."""
    errors = []
    for style in styles:
        toy = hybrid(inner, outer, shape, name=name)
        for cycle, microbatches in enumerate((1, 2, 3, 4)):
            toy.run_cycle(microbatches, cycle=cycle, style=style)
            expected = expected_gradient(name, WORLD, microbatches, torch.float64, cycle)
            errors.append(relative_difference(toy.full_gradient(), expected))
            toy.model.zero_grad_buffer()
    return errors


def training_error(inner: str, outer: str, dtype: torch.dtype) -> float:
    """Largest difference of a parameter after three clipped AdamW steps of two microbatches."""
    toy = hybrid(inner, outer, dtype=dtype)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters(), lr=0.01))
    make = partial(torch.optim.AdamW, lr=0.01)
    wanted, norms = train(NAME, WORLD, 2, 3, make, clip_norm=0.5, dtype=dtype)
    for cycle, expected in enumerate(norms):
        toy.run_cycle(2, cycle=cycle)
        norm = float(clip_grad_norm_(toy.model, 0.5))
        assert norm == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    return relative_difference(toy.full_parameters(), wanted)


def late_accumulation(inner: str) -> str:
    toy = hybrid(inner, "no_shard")
    toy.run_cycle(1)
    with pytest.raises(GradAlreadyReducedError) as error:
        toy.backward()
    toy.model.zero_grad_buffer()
    return str(error.value)


def adam_on_replicas() -> bool:
    toy = hybrid("no_shard", "no_shard")
    optimizer = fully_shard_optimizer(torch.optim.Adam(toy.model.parameters(), foreach=False))
    toy.run_cycle(1)
    optimizer.step()
    # The step itself is local: what torch makes of the placements shows as well.
    return all(
        bool(torch.isfinite(gather_full(p)).all())
        and len(p.placements) == p.device_mesh.ndim  # type: ignore[attr-defined]
        and torch.equal(p.detach().full_tensor(), gather_full(p))  # type: ignore[attr-defined]
        for p in toy.model.parameters()
    )


#: Every pair on 2 x 2 ranks; where one axis has one rank, daily the pairs that shard all.
PAIRS_AND_SHAPES = [
    pytest.param(
        *(inner, outer, shape),
        marks=() if shape == 2 or inner == "optim_grads_params" else pytest.mark.nightly,
    )
    for inner, outer in PAIRS
    for shape, _ in SHAPES
]


@pytest.mark.sample
@pytest.mark.parametrize(("inner", "outer", "shape"), PAIRS_AND_SHAPES)
def test_gradients_are_the_mean_over_both_axes(
    ranks: RankPool, inner: str, outer: str, shape: int
) -> None:
    for errors in ranks.run(gradient_errors, inner, outer, shape, NAME):
        assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("name", ["linear_stack", "tied_embedding", "frozen", "conv_linear"])
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_uneven_tied_and_frozen_parameters_survive_both_axes(
    ranks: RankPool, name: str, outer: str
) -> None:
    for errors in ranks.run(gradient_errors, "optim_grads_params", outer, 2, name, ("no_sync",)):
        assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_three_clipped_adamw_steps_equal_one_process(
    ranks: RankPool, inner: str, outer: str, dtype: torch.dtype
) -> None:
    bound = 1e-12 if dtype is torch.float64 else 2e-6
    assert max(ranks.run(training_error, inner, outer, dtype)) < bound


@pytest.mark.parametrize("inner", STRATEGIES)
def test_a_microbatch_after_the_outer_stage_is_refused(ranks: RankPool, inner: str) -> None:
    for message in ranks.run(late_accumulation, inner):
        assert "already reduced in this cycle" in message


def test_r14_adam_steps_on_weights_replicated_over_two_axes(ranks: RankPool) -> None:
    assert ranks.run(adam_on_replicas) == [True] * WORLD


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_r13_gathered_rows_are_in_their_places(ranks: RankPool, inner: str, outer: str) -> None:
    assert ranks.run(gathered_rows, inner, outer) == [True] * WORLD
