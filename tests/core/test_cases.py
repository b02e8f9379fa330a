"""Training, told by the quick cases and programs of `validate`, which know nothing of the core.

They compare gradients, norms, weights, losses, bytes on the wire and bytes in memory with plain
torch, over strategies, meshes, models, dtypes, microbatches, allocators and transports.
`make nightly` runs the full matrix (tests/run/test_validate_engines.py).
"""

from __future__ import annotations

import pytest
import torch
from optional import param

from bench.testing.workers import Workers
from bench.validate import rank
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.fuzz.session import outcome_of
from bench.validate.judge import judge
from bench.validate.matrix import AnyCase, cases
from bench.validate.ranks import outcome_on

pytestmark = pytest.mark.processes

_SECONDS = 60.0


@pytest.mark.parametrize(
    "case",
    [
        param(one, {"safetensors"} if one.id.endswith("/exported") else (), id=one.id)
        for one in cases("mfsdp", full=False)
    ],
)
def test_training_is_that_of_plain_torch(case: AnyCase, worlds: Workers) -> None:
    if isinstance(case, ProgramCase):
        outcome = outcome_of(worlds, case.program)
        assert outcome.kind == "equal", outcome.text
        return
    torch.set_num_threads(1)  # as on the ranks
    seen = outcome_on(worlds, rank.run, case, "cpu", ranks=case.ranks, seconds=_SECONDS)
    verdict = judge(case, seen, torch.device("cpu"))
    assert verdict.state == "passed", verdict.failures or verdict.reason
