"""R5: a change of the communication dtype takes effect, and a forbidden change raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import PolicyChangeError
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes


def policy(comm: torch.dtype, main: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=main, grad_comm_dtype=comm
    )


def reduction_dtypes(strategy: str) -> list[set[str]]:
    """Dtypes of the reductions in three cycles: fp32, changed to bf16, changed back."""
    seen = []
    toy = shard("aligned_stack", strategy, 2, mixed_precision_policy=policy(torch.float32))
    for cycle, comm in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        toy.model.reset_mixed_precision_policy(policy(comm))
        with toy.collectives() as counts:
            toy.run_cycle(2, cycle)
        seen.append({dtype for op, dtype in counts if op != "all_gather"})
        toy.model.zero_grad_buffer()
    return seen


def kept_and_refused(strategy: str) -> tuple[MixedPrecisionPolicy, list[str]]:
    """The policy in force after others were asked for, and what is said while buckets are live."""
    toy = shard("aligned_stack", strategy, 2, mixed_precision_policy=policy(torch.float32))
    messages = []

    def change_while_reductions_are_under_way(_gradient: torch.Tensor) -> None:
        with pytest.raises(PolicyChangeError) as live:
            toy.model.reset_mixed_precision_policy(policy(torch.bfloat16))
        messages.append(str(live.value))

    def watch(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(change_while_reductions_are_under_way)

    wanted = MixedPrecisionPolicy(torch.float64, torch.bfloat16, torch.bfloat16)
    with toy.model.mixed_precision_context(mixed_precision_policy=wanted):
        assert toy.model.mp_policy == policy(torch.bfloat16)
    toy.model.module.blocks[0].register_forward_hook(watch)
    with toy.model.sync():
        toy.backward()
    return toy.model.mp_policy, messages


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r5_the_communication_dtype_of_the_wire_follows_the_policy(
    ranks: RankPool, strategy: str
) -> None:
    for seen in ranks.run(reduction_dtypes, strategy):
        assert seen == [{"float32"}, {"bfloat16"}, {"float32"}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r5_main_dtypes_and_live_buckets_keep_their_policy(ranks: RankPool, strategy: str) -> None:
    for in_force, said in ranks.run(kept_and_refused, strategy):
        assert in_force == policy(torch.float32)
        assert said
        assert all("live" in message for message in said)
