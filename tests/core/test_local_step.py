"""The optimizer's step on local tensors: same numbers, DTensors outside, others untouched."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.state import local_step
from mfsdp_core.state.local_step import LocalStep
from oracle.sharded import shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


def test_pieces_leave_state_tensors_where_they_are() -> None:
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = torch.optim.AdamW(toy.model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_step, "PIECE_ELEMENTS", 16)
        for step in range(3):
            toy.run_cycle(1, step)
            optimizer.step()
            optimizer.zero_grad()
            seen.append([id(v) for state in optimizer.state.values() for v in state.values()])
    assert seen[0] == seen[1] == seen[2]
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_step_that_raises_leaves_parameters_gradients_and_state_as_they_were() -> None:
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    parameters = list(toy.model.parameters())
    plain = torch.nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([*parameters, plain], lr=0.1)
    toy.run_cycle(1)
    LocalStep(optimizer, optimizer.step)()

    def kinds() -> dict[str, type]:
        return {k: type(v) for k, v in optimizer.state[parameters[0]].items()}

    before = kinds()

    def broken() -> None:
        raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle"):
        LocalStep(optimizer, broken)()
    held = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, [*parameters, plain], strict=True))
    assert kinds() == before
    assert issubclass(before["exp_avg"], DTensor)
    assert len(optimizer.state) == len(held)
    assert plain.grad is not None
    assert all(p.grad is not None for p in parameters)
