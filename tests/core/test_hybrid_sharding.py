"""Hybrid sharding on two axes: HSDP (outer replicates) and HFSDP (outer shards the optimizer)."""

from __future__ import annotations

import pytest
import torch

from conformance.judging import same
from mfsdp_core import (
    fully_shard_optimizer,
    gather_full,
)
from mfsdp_core.errors import GradAlreadyReducedError
from oracle.cycles import gathered
from oracle.hybrid import PAIRS, hybrid
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


@pytest.mark.parametrize("inner", STRATEGIES)
def test_a_microbatch_after_the_outer_stage_is_refused(inner: str) -> None:
    toy = hybrid(inner, "no_shard")
    toy.run_cycle(1)
    with pytest.raises(GradAlreadyReducedError, match="already reduced in this cycle"):
        toy.backward()
    toy.model.zero_grad_buffer()


def test_r14_adam_steps_on_weights_replicated_over_two_axes() -> None:
    """The step itself is local: what torch makes of the placements shows as well."""
    toy = hybrid("no_shard", "no_shard")
    optimizer = fully_shard_optimizer(torch.optim.Adam(toy.model.parameters(), foreach=False))
    toy.run_cycle(1)
    optimizer.step()
    for key, parameter in toy.parameters():
        assert bool(torch.isfinite(gather_full(parameter)).all()), key
        assert len(parameter.placements) == parameter.device_mesh.ndim, key
        same(key, parameter.detach().full_tensor(), gather_full(parameter).detach())


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_r13_gathered_rows_are_in_their_places(inner: str, outer: str) -> None:
    """Those of weights and of optimizer state."""
    toy = hybrid(inner, outer, name="conv_linear")
    optimizer = torch.optim.Adam(toy.model.parameters(), lr=0.01)
    fully_shard_optimizer(optimizer)
    toy.run_cycle(1)
    optimizer.step()
    weights = {key: p.detach() for key, p in toy.parameters()}
    same("weights", gathered(weights), toy.full_parameters())
    moments = {key: optimizer.state[p]["exp_avg"] for key, p in toy.parameters()}
    same("moments", gathered(moments), toy._joined(moments))
