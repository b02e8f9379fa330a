"""What goes over the wire is exactly what the strategy promises: operations, counts, dtypes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

# aligned_stack has three units and a root of one bucket each.
BUCKETS, UNITS = 4, 3
Counts = Counter[tuple[str, str]]


def counts_of_second_cycle(
    strategy: str, microbatches: int, dtype: torch.dtype, policy: dict[str, torch.dtype | None]
) -> Counts:
    """Counts of a full cycle (k microbatches and a step), in the steady state."""
    toy = shard(
        "aligned_stack", strategy, 2, dtype, mixed_precision_policy=MixedPrecisionPolicy(**policy)
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=0.1))
    for cycle in (0, 1):
        with toy.collectives() as counts:
            toy.run_cycle(microbatches, cycle)
            optimizer.step()
            optimizer.zero_grad()
            # The weights refreshed by the step may be gathered by the next forward pass.
        if cycle == 0:
            continue
    return counts


@pytest.mark.sample
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_of_a_cycle_are_counted_exactly(
    ranks: RankPool, strategy: str, microbatches: int
) -> None:
    k = microbatches
    expected = {
        "no_shard": {"all_reduce": BUCKETS},
        "optim": {"reduce_scatter": BUCKETS, "all_gather": BUCKETS},
        "optim_grads": {"reduce_scatter": k * BUCKETS, "all_gather": BUCKETS},
        # Units are gathered for every forward and backward pass, root-owned weights once a cycle.
        "optim_grads_params": {"reduce_scatter": k * BUCKETS, "all_gather": 2 * k * UNITS + 1},
    }[strategy]
    policy = {"main_params_dtype": torch.float32}
    for counts in ranks.run(counts_of_second_cycle, strategy, k, torch.float32, policy):
        assert counts == {(operation, "float32"): n for operation, n in expected.items()}


@pytest.mark.sample
@pytest.mark.parametrize("comm", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_travel_in_the_communication_dtype_and_weights_in_the_compute_dtype(
    ranks: RankPool, strategy: str, comm: torch.dtype
) -> None:
    policy: dict[str, Any] = {"main_grads_dtype": torch.float32, "grad_comm_dtype": comm}
    for counts in ranks.run(counts_of_second_cycle, strategy, 2, torch.bfloat16, policy):
        reductions = {dtype for op, dtype in counts if op in {"all_reduce", "reduce_scatter"}}
        gathers = {dtype for op, dtype in counts if op == "all_gather"}
        assert reductions == {str(comm).removeprefix("torch.")}
        assert gathers <= {"bfloat16"}
