"""The optimizer's step on local tensors: same numbers, DTensors outside, others untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.state import local_step
from mfsdp_core.state.local_step import LocalStep
from oracle.ranks import RankPool
from oracle.sharded import shard

pytestmark = pytest.mark.processes

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


def equal_to_the_dispatcher(build: str, options: dict[str, Any]) -> list[bool]:
    fast, fast_state = trained(build, options, local=True)
    slow, slow_state = trained(build, options, local=False)
    found = [torch.equal(fast[name], slow[name]) for name in slow]
    found.append(fast_state["param_groups"] == slow_state["param_groups"])
    for index, wanted in slow_state["state"].items():
        values = fast_state["state"][index]
        found.append(list(values) == list(wanted))
        for name, value in wanted.items():
            found.append(type(values[name]) is type(value))
            if isinstance(value, DTensor):
                found.append(values[name].placements == value.placements)
                found.append(values[name].shape == value.shape)
                found.append(torch.equal(values[name].to_local(), value.to_local()))
    return found


@pytest.mark.parametrize(
    ("build", "options"),
    [
        ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}),
        ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ],
)
def test_a_step_on_local_tensors_equals_the_step_on_dtensors_bit_by_bit(
    ranks: RankPool, build: str, options: dict[str, Any]
) -> None:
    for found in ranks.run(equal_to_the_dispatcher, build, options):
        assert found
        assert all(found)


def cut(build: str, options: dict[str, Any], elements: int) -> list[bool]:
    """As `equal_to_the_dispatcher`, in pieces of so many elements; and whether there were any."""
    steps: list[int] = []
    whole, local_step.PIECE_ELEMENTS = local_step.PIECE_ELEMENTS, elements
    pieces = local_step._Swapped._pieces

    def counted(self: Any, *arguments: Any) -> Any:
        stand_ins = pieces(self, *arguments)
        steps.append(len(stand_ins))
        return stand_ins

    local_step._Swapped._pieces = counted  # type: ignore[method-assign]
    try:
        found = equal_to_the_dispatcher(build, options)
    finally:
        local_step.PIECE_ELEMENTS = whole
        local_step._Swapped._pieces = pieces  # type: ignore[method-assign]
    return [*found, bool(steps), all(number > 1 for number in steps)]


@pytest.mark.sample
@pytest.mark.parametrize("elements", [16, 33])
@pytest.mark.parametrize(
    ("build", "options"),
    [
        ("AdamW", {"lr": 0.01, "amsgrad": True}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
        ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
        ("Adagrad", {"lr": 0.01, "lr_decay": 0.1}),
        ("Adadelta", {"lr": 0.1}),
        ("Adamax", {"lr": 0.01}),
        ("NAdam", {"lr": 0.01}),
        ("RAdam", {"lr": 0.01}),
        ("ASGD", {"lr": 0.01}),
    ],
)
def test_a_step_in_pieces_equals_the_step_as_a_whole_bit_by_bit(
    ranks: RankPool, build: str, options: dict[str, Any], elements: int
) -> None:
    for found in ranks.run(cut, build, options, elements):
        assert all(found), found


def state_kept_in_place() -> list[bool]:
    """Whether pieces leave the optimizer the very state tensors that it had."""
    local_step.PIECE_ELEMENTS, whole = 16, local_step.PIECE_ELEMENTS
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = torch.optim.AdamW(toy.model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    seen = []
    for step in range(3):
        toy.run_cycle(1, step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([id(v) for state in optimizer.state.values() for v in state.values()])
    local_step.PIECE_ELEMENTS = whole
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return [seen[0] == seen[1] == seen[2], steps == {3.0}]


def test_pieces_leave_state_tensors_where_they_are(ranks: RankPool) -> None:
    for found in ranks.run(state_kept_in_place):
        assert all(found)


class Watching(torch.optim.SGD):
    """Of a class of its own: nobody can know that it looks at one element at a time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[bool] = []

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen += [isinstance(p, DTensor) for p in self.param_groups[0]["params"]]
        return super().step(closure)


def seen_by_a_class_of_its_own() -> list[bool]:
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = Watching(toy.model.parameters())
    fully_shard_optimizer(optimizer)
    toy.run_cycle(1)
    optimizer.step()
    return optimizer.seen


def test_an_optimizer_of_an_unknown_class_sees_dtensors(ranks: RankPool) -> None:
    for seen in ranks.run(seen_by_a_class_of_its_own):
        assert seen
        assert all(seen)


def after_a_step_that_raises() -> list[bool]:
    toy = shard(NAME, "optim_grads_params", 2, torch.float32)
    parameters = list(toy.model.parameters())
    plain = torch.nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([*parameters, plain], lr=0.1)
    toy.run_cycle(1)
    LocalStep(optimizer, optimizer.step)()
    before = {k: type(v) for k, v in optimizer.state[parameters[0]].items()}

    def broken() -> None:
        raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle"):
        LocalStep(optimizer, broken)()
    held = optimizer.param_groups[0]["params"]
    return [
        all(one is other for one, other in zip(held, [*parameters, plain], strict=True)),
        {k: type(v) for k, v in optimizer.state[parameters[0]].items()} == before,
        issubclass(before["exp_avg"], DTensor),
        len(optimizer.state) == len(held),
        plain.grad is not None,
        all(p.grad is not None for p in parameters),
    ]


def test_a_step_that_raises_leaves_parameters_gradients_and_state_as_they_were(
    ranks: RankPool,
) -> None:
    for found in ranks.run(after_a_step_that_raises):
        assert all(found), found
