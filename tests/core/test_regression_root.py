"""R8, R9: the root runs through `__call__`, and its parameters stay while they may be read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.testing.toy_models import Reader
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from mfsdp_core.events import Event
from oracle.models import Block, build, loss
from oracle.ranks import RankPool, mesh
from oracle.reference import relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes


def outputs_and_hook_calls(strategy: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output of the sharded model, of the bare one, and how often a hook on the root ran."""
    toy = shard("root_owned", strategy, 2, torch.float64)
    calls = []
    toy.model.module.register_forward_hook(lambda *_: calls.append(1))
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    # The second cycle starts after a release of everything that may be released.
    for cycle in (0, 1):
        toy.run_cycle(1, cycle)
        toy.model.zero_grad_buffer()
    calls.clear()
    with torch.no_grad():
        found = toy.model(inputs).clone()
        expected = build("root_owned", torch.float64)(inputs)
    return found, expected, len(calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r8_root_owned_parameters_are_gathered_and_root_hooks_run(
    ranks: RankPool, strategy: str
) -> None:
    for found, expected, calls in ranks.run(outputs_and_hook_calls, strategy):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert calls == 1


class Aside(nn.Module):
    """A weight of a child, which the root owns, is read raw for a value that is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        self.aside = loss(self.reader(x))
        return self.block(x)


def root_over_two_steps(strategy: str) -> tuple[list[str], float]:
    """What was released in two steps, and the error of gradients that come from the value aside."""
    torch.manual_seed(8)
    reference = Aside().double()
    torch.manual_seed(8)
    model = fully_shard_model(
        Aside().double(),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    released: list[str] = []

    def follow(event: Event) -> None:
        if event.kind == "release":
            released.append(event.bucket)

    model.events.subscribe(follow)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    worst = 0.0
    for _ in range(2):
        loss(model(x)).backward()
        model.zero_grad_buffer()
        if any("root" in bucket for bucket in released):
            return released, float("inf")  # what follows would read freed memory
        model(x)
        model.module.aside.backward()
        reference(x)
        reference.zero_grad()
        reference.aside.backward()
        for name, wanted in reference.reader.named_parameters(prefix="module.reader"):
            found = gather_full(dict(model.named_parameters())[name].grad)
            worst = max(worst, relative_difference({name: found}, {name: wanted.grad}))
        model.zero_grad_buffer()
    return released, worst


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r9_root_owned_parameters_stay_while_a_child_may_read_them(
    ranks: RankPool, strategy: str
) -> None:
    for released, error in ranks.run(root_over_two_steps, strategy):
        assert bool(released) == (strategy == "optim_grads_params")
        assert not any("root" in bucket for bucket in released)
        assert error < 1e-12
