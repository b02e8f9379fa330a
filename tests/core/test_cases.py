"""Training, told by the quick cases and programs of `validate`, which know nothing of the core.

They compare gradients, norms, weights, losses, bytes on the wire and bytes in memory with plain
torch, over strategies, meshes, models, dtypes, microbatches, allocators and transports.
`make nightly` runs the full matrix (tests/run/test_validate_engines.py).
"""

from __future__ import annotations

import pytest
import torch
from optional import param

from bench.resolve.machine import Machine
from bench.testing.workers import Workers
from bench.validate.cases import AnyCase
from bench.validate.judge import judge
from bench.validate.matrix import cases
from bench.validate.session import WorkerSettings, outcome_here

pytestmark = pytest.mark.processes

_SETTINGS, _MACHINE = WorkerSettings(case_seconds=60.0), Machine.detect()


@pytest.mark.parametrize(
    "case",
    [
        param(one, {"safetensors"} if one.id.endswith("/exported") else (), id=one.id)
        for one in cases("mfsdp", full=False)
    ],
)
def test_training_is_that_of_plain_torch(case: AnyCase, worlds: Workers) -> None:
    torch.set_num_threads(1)  # as on the ranks
    outcome = outcome_here(_SETTINGS, _MACHINE, worlds, case)
    verdict = judge(case, outcome, torch.device("cpu"))
    assert verdict.state == "passed", verdict.failures or verdict.reason
