"""What a failure of `validate` says: the exception, and where the engine was."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bench.engines.inspection import LocalRows
from bench.errors import UnsupportedError
from bench.testing.workers import WorkerFailure, WorkersError
from bench.validate import scenario
from bench.validate.case_evidence import WrongError, numbers_apart
from bench.validate.cases import Case
from bench.validate.checks.weights import replicas
from bench.validate.judge import _placed, settings
from bench.validate.observation import Seen
from bench.validate.outcomes import outcome_on
from bench.validate.traces import exception_of, frames_of
from bench.verdict import CheckVerdict, Finding

ROOT = Path(__file__).parents[2]
TRACEBACK = f"""Traceback (most recent call last):
  File "{ROOT}/bench/testing/worker.py", line 65, in _answer_calls
    answer = CallResult(call.run())
  File "/tmp/core-x/mfsdp_core/wrapper.py", line 10, in forward
    return inner()
  File "/tmp/core-x/mfsdp_core/runtime/hooks.py", line 20, in look
    raise LifecycleError(
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 5, in _call_impl
    return forward_call()
mfsdp_core.errors.LifecycleError: rank 1: expected one pass, found two.
Look at the loop: call zero_grad() first.
  an indented hint
"""
STACK = f"""Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 7 in wait
  File "{ROOT}/mfsdp_core/comm/rendezvous.py", line 30 in meet
  File "{ROOT}/bench/validate/scenario.py", line 9 in backward
"""


def test_a_case_says_in_words_what_it_does() -> None:
    case = Case("mfsdp", "optim", model="sparse", scenario="redirected")
    assert settings(case)["does"] == (
        "the communication dtype changes between steps, and back."
        " Model: The embedding's gradient is a sparse tensor."
    )


def test_numbers_that_differ_are_never_printed_alike() -> None:
    numbers = torch.arange(1.0, 5.0, dtype=torch.float64)
    for more, last in ((1e-12, "4.000000000001"), (0.5, "4.5"), (torch.nan, "nan")):
        found = numbers_apart(numbers, torch.cat([numbers[:3], numbers[3:] + more]))
        assert found == {"expected": "[..., 2, 3, 4]", "found": f"[..., 2, 3, {last}]"}


def test_replicas_of_unlike_shapes_are_told_so() -> None:
    seen = [Seen(rank, initial={"w": LocalRows(torch.ones(5 + rank))}) for rank in (0, 1)]
    evidence = Mock(seen=seen, steps=[], reference=Mock(shapes={"w": (5,)}))
    with pytest.raises(WrongError) as caught:
        replicas(evidence)
    assert caught.value.finding.found == "shape (6,)"


def test_the_finding_is_the_exception_and_not_its_advice() -> None:
    said = "mfsdp_core.errors.LifecycleError: rank 1: expected one pass, found two."
    assert exception_of(TRACEBACK) == said
    assert exception_of(f"{TRACEBACK}\nTraceback (most recent call last):\n  x\nKeyError: 1") == (
        "KeyError: 1"
    )
    assert exception_of("died with SIGSEGV") == "died with SIGSEGV"


@pytest.mark.parametrize("view", [None, Mock()])
def test_an_engine_whose_inspection_is_none_is_refused(
    view: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "build_engine", lambda *_: Mock(inspection=lambda: view))
    with pytest.raises(UnsupportedError, match="subclass of"):
        scenario.Bench(Case("single", "no_shard", ranks=1), 0, torch.device("cpu"))


def test_frames_are_those_of_the_core_and_never_of_the_harness() -> None:
    assert frames_of(TRACEBACK) == (
        "at mfsdp_core/runtime/hooks.py:20 in look",
        "at mfsdp_core/wrapper.py:10 in forward",
    )
    assert frames_of(STACK) == ("at mfsdp_core/comm/rendezvous.py:30 in meet",)


def test_of_an_engine_from_elsewhere_its_own_frames_are_told() -> None:
    stack = STACK.replace(f"{ROOT}/mfsdp_core/comm", "/srv/engine")
    assert frames_of(stack) == ("at /srv/engine/rendezvous.py:30 in meet",)


def verdict(rank: int | None) -> CheckVerdict:
    return CheckVerdict(check="volume", state="failed", finding=Finding(step=1, rank=rank))


def test_both_axes_and_the_node_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    case = Case("mfsdp", "optim_grads_params", ranks=4, outer=2)
    found = _placed(verdict(2), case).finding
    assert found is not None
    assert found.place == "step 1, rank 2 (outer 1, inner 0, on n7)"


class Stale:
    """Ranks that meet a group of an earlier world in torch's caches, so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def run(self, *_: object, **__: object) -> list[str]:
        self.left -= 1
        if self.left < 0:
            return ["trained"]
        said = "RuntimeError: Could not resolve the process group registered under the name 5"
        raise WorkersError([WorkerFailure(0, "raised", said)], {})


@pytest.mark.parametrize(("times", "kind"), [(0, "ended"), (1, "ended"), (2, "raised")])
def test_ranks_with_stale_groups_are_asked_anew_once(times: int, kind: str) -> None:
    found = outcome_on(Stale(times), print, ranks=1, seconds=1.0)  # type: ignore[arg-type]
    assert found.kind == kind
    assert found.answers == (("trained",) if kind == "ended" else ())
