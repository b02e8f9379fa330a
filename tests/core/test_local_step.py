"""The optimizer's step on local tensors: same numbers, DTensors outside, others untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.state.local_step import LocalStep
from oracle.ranks import RankPool
from oracle.sharded import shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


def trained(build: str, options: dict[str, Any], *, local: bool) -> tuple[Any, dict[str, Any]]:
    """Three steps of two ranks; the whole parameters and the optimizer's state dict."""
    subject = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = getattr(torch.optim, build)(subject.model.parameters(), **options)
    if not local:
        # A hook may look at parameters, so the step keeps its DTensors.
        optimizer.register_step_pre_hook(lambda *_: None)
    fully_shard_optimizer(optimizer)
    for step in range(3):
        subject.run_cycle(1, step)
        optimizer.step()
        optimizer.zero_grad()
    return subject.full_parameters(), optimizer.state_dict()


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
        ("AdamW", {"lr": 0.01}),
        ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}),
        ("SGD", {"lr": 0.01, "momentum": 0.9}),
        ("RMSprop", {"lr": 0.01}),
    ],
)
def test_a_step_on_local_tensors_equals_the_step_on_dtensors_bit_by_bit(
    ranks: RankPool, build: str, options: dict[str, Any]
) -> None:
    for found in ranks.run(equal_to_the_dispatcher, build, options):
        assert found
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
    subject = shard(NAME, "optim_grads_params", 2, torch.float32)
    optimizer = Watching(subject.model.parameters())
    fully_shard_optimizer(optimizer)
    subject.run_cycle(1)
    optimizer.step()
    return optimizer.seen


def test_an_optimizer_of_an_unknown_class_sees_dtensors(ranks: RankPool) -> None:
    for seen in ranks.run(seen_by_a_class_of_its_own):
        assert seen
        assert all(seen)


def after_a_step_that_raises() -> list[bool]:
    subject = shard(NAME, "optim_grads_params", 2, torch.float32)
    parameters = list(subject.model.parameters())
    plain = torch.nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([*parameters, plain], lr=0.1)
    subject.run_cycle(1)
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
        before["exp_avg"] is DTensor,
        len(optimizer.state) == len(held),
        plain.grad is not None,
        all(p.grad is not None for p in parameters),
    ]


def test_a_step_that_raises_leaves_parameters_gradients_and_state_as_they_were(
    ranks: RankPool,
) -> None:
    for found in ranks.run(after_a_step_that_raises):
        assert all(found), found
