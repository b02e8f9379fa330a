"""R8: the root is called through `__call__`, so its own hooks run and its parameters are there."""

from __future__ import annotations

import pytest
import torch

from oracle.models import build
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes


def outputs_and_hook_calls(strategy: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output of the sharded model, of the bare one, and how often a hook on the root ran."""
    subject = shard("root_owned", strategy, 2, torch.float64)
    calls = []
    subject.model.module.register_forward_hook(lambda *_: calls.append(1))
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    # The second cycle starts after a release of everything that may be released.
    for cycle in (0, 1):
        subject.run_cycle(1, cycle)
        subject.model.zero_grad_buffer()
    calls.clear()
    with torch.no_grad():
        found = subject.model(inputs).clone()
        expected = build("root_owned", torch.float64)(inputs)
    return found, expected, len(calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r8_root_owned_parameters_are_gathered_and_root_hooks_run(
    ranks: RankPool, strategy: str
) -> None:
    for found, expected, calls in ranks.run(outputs_and_hook_calls, strategy):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert calls == 1
