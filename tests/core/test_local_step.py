"""The optimizer's step on local tensors: same numbers, DTensors outside, others untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from conformance.judging import same
from conformance.small_model import counted_pieces
from mfsdp_core import fully_shard_optimizer
from mfsdp_core.state import local_step
from mfsdp_core.state.local_step import LocalStep
from oracle.sharded import shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


def trained(build: str, options: dict[str, Any], *, local: bool) -> tuple[Any, dict[str, Any]]:
    """Three steps of two ranks; the whole parameters and the optimizer's state dict."""
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = getattr(torch.optim, build)(toy.model.parameters(), **options)
    if not local:
        # A hook may look at parameters, so the step keeps its DTensors.
        optimizer.register_step_pre_hook(lambda *_: None)
    fully_shard_optimizer(optimizer)
    for step in range(3):
        toy.run_cycle(1, step)
        optimizer.step()
        optimizer.zero_grad()
    return toy.full_parameters(), optimizer.state_dict()


@pytest.mark.parametrize(
    ("build", "options", "elements"),
    [
        ("AdamW", {"lr": 0.01, "amsgrad": True}, 16),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}, 33),
        ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}, 16),
        ("Adagrad", {"lr": 0.01, "lr_decay": 0.1}, 33),
        ("NAdam", {"lr": 0.01}, None),
        *(
            pytest.param(build, options, 16, marks=pytest.mark.nightly)
            for build, options in (
                ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
                ("Adadelta", {"lr": 0.1}),
                ("Adamax", {"lr": 0.01}),
                ("RAdam", {"lr": 0.01}),
                ("ASGD", {"lr": 0.01}),
            )
        ),
    ],
)
def test_a_step_on_local_tensors_equals_the_step_on_dtensors_bit_by_bit(
    build: str, options: dict[str, Any], elements: int | None
) -> None:
    """elements: of a piece, of which there are several; None is the step as a whole."""
    with counted_pieces(elements) as steps:
        fast, fast_state = trained(build, options, local=True)
        slow, slow_state = trained(build, options, local=False)
    assert elements is None or min(steps) > 1, steps
    same("weights", fast, slow)
    same("groups", fast_state["param_groups"], slow_state["param_groups"])
    assert slow_state["state"]
    for index, wanted in slow_state["state"].items():
        values = fast_state["state"][index]
        assert list(values) == list(wanted)
        for name, value in wanted.items():
            found = values[name]
            assert type(found) is type(value), name
            if isinstance(value, DTensor):
                assert (found.placements, found.shape) == (value.placements, value.shape), name
                same(name, found.to_local(), value.to_local())


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
