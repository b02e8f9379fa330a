"""`validate` passes right engines, and says what is wrong with wrong ones, whoever wrote them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from bench.known_failures import of_case
from bench.testing.workers import ForkServer
from bench.validate import applicability, outcomes, session
from bench.validate.cases import Case
from bench.validate.matrix import cases
from bench.validate.session import WorkerSettings, verdicts
from bench.verdict import CaseVerdict, Finding, ValidationRecord
from reports.sections.validation import errors_table

pytestmark = pytest.mark.processes

#: Of `mfsdp` tests/core/test_cases.py has all.
SAMPLE = (
    Case("fsdp2", "optim_grads_params", model="rooted", microbatches=2),
    Case("fsdp2", "optim_grads_params", ranks=4, reshard=2, microbatches=2),
    Case("ddp", "no_shard", policy="bf16"),
    # What was reduced before the further pass is rounded once more with it.
    Case("ddp", "no_shard", "recomputed", "bf16", microbatches=3, scenario="again"),
    Case("single", "no_shard", ranks=1, microbatches=2),
    Case("thread_bugs:Averaging", "no_shard", microbatches=3),
    Case("thread_bugs:Averaging", "no_shard", ranks=4, outer=2, microbatches=3),
    Case("validate_engines:Replicating", "no_shard"),
    Case("toy_engine:build", "no_shard", "unused", microbatches=2),
)


def outside(name: str, **settings: object) -> Case:
    return Case(f"validate_engines:{name}", "no_shard", **settings)  # type: ignore[arg-type]


def judged(fork_server: ForkServer, *asked: Case, seconds: float = 100.0) -> list[CaseVerdict]:
    return list(verdicts(fork_server, asked, WorkerSettings(case_seconds=seconds)))


def found(verdict: CaseVerdict) -> tuple[list[str], Finding]:
    """Names of the failed checks, and the finding of the first."""
    assert verdict.state == "failed", verdict
    finding = verdict.failures[0].finding
    assert finding is not None
    return [check.check for check in verdict.failures], finding


def test_right_engines_pass(fork_server: ForkServer) -> None:
    for verdict in judged(fork_server, *SAMPLE):
        assert verdict.state == "passed", (verdict.case, verdict.failures, verdict.reason)


def test_fsdp2_refuses_what_two_units_share_or_is_wrong_as_is_known(
    fork_server: ForkServer,
) -> None:
    """torch 2.11 makes two weights of one; later ones refuse in the first pass."""
    case = Case("fsdp2", "optim_grads_params", "cross_tied", microbatches=2)
    (verdict,) = judged(fork_server, case)
    if verdict.state == "failed":
        known = of_case("fsdp2", case.id, verdict.failures)
        assert known is not None
        assert torch.__version__.startswith("2.11.")
        return
    assert verdict.state == "not_applicable"
    assert re.match(r"fully_shard of torch \S+ refuses it: .* shared", verdict.reason or "")


def test_what_an_engine_refuses_is_not_applicable_with_its_reason(fork_server: ForkServer) -> None:
    case = Case("validate_engines:Replicating", "optim")
    (verdict,) = judged(fork_server, case)
    assert (verdict.state, verdict.reason) == (
        "not_applicable",
        "this engine replicates on one axis",
    )


def test_a_table_says_how_far_every_gradient_is_off(fork_server: ForkServer) -> None:
    """Summing makes each twice what is right: off by itself. Others are off by rounding."""
    cases = (outside("Summing"), outside("Replicating"))
    twice, right = verdicts(fork_server, cases, WorkerSettings(), errors=True)
    assert len(twice.errors) == len(right.errors) > 10
    assert all(abs(error.relative - 1) < 1e-9 for error in twice.errors)
    assert all(error.relative < 1e-12 for error in right.errors)
    record = ValidationRecord(engines=("engine",), cases=(twice,))
    row = next(iter(errors_table(record).rows)).cells
    assert row[0] == twice.case
    assert float(row[3]) > 0
    assert row[4] == "1.00e+00"


def test_weights_that_stayed_gathered_after_an_evaluation_are_loaded_into(
    fork_server: ForkServer,
) -> None:
    case = Case("fsdp2", "optim_grads", policy="fp32", microbatches=3, scenario="reloaded")
    (verdict,) = judged(fork_server, case)
    known = of_case("fsdp2", case.id, verdict.failures)
    assert known is not None, verdict.failures
    assert known.does == "a state dict with a missing entry is loaded"


def test_a_case_whose_optional_package_is_absent_is_skipped_in_words(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applicability, "locate", lambda _name: None)
    monkeypatch.setattr(
        session, "outcome_on", lambda *_, **__: pytest.fail("it was asked all the same")
    )
    case = Case("mfsdp", "optim", model="scalar", scenario="exported", policy="bf16")
    (verdict,) = judged(fork_server, case)
    assert verdict.state == "not_applicable"
    assert verdict.reason == (
        "needs the package safetensors, which is not installed here: pip install safetensors"
    )


def test_low_precision_gathers_that_did_not_happen_fail(fork_server: ForkServer) -> None:
    case = Case("validate_engines:Deaf", "optim_grads_params", policy="bf16", recipe="current")
    (verdict,) = judged(fork_server, case)
    checks, _ = found(verdict)
    assert {"computed weights", "gather precision"} <= set(checks)
    finding = next(c.finding for c in verdict.failures if c.check == "gather precision")
    assert finding is not None
    assert finding.found.startswith("low-precision gathers were requested and not made: bfloat16")


class Wrong(NamedTuple):
    """The case of a wrong engine, the check that fails first, and what its finding says."""

    case: Case
    check: str
    says: tuple[str, ...]
    also: tuple[str, ...] = ()


GRADIENTS, STEP = "gradients", "optimizer step"
WRONG = {
    "the sum over ranks": Wrong(
        outside("Summing"),
        GRADIENTS,
        (
            "step 1, microbatch 1, rank 0",
            "every rank's gradient of microbatch 1 counts 1 times, expected 0.5",
        ),
    ),
    "a no_sync that is still open": Wrong(
        outside("Unclosed"), GRADIENTS, ("a no_sync() were still open", "own contribution")
    ),
    "an element behind the first": Wrong(outside("FarOff"), "computed weights", ()),
    "never cleared": Wrong(
        outside("Keeping"),
        GRADIENTS,
        ("step 2", "it holds 1 times the gradient of the step before"),
    ),
    "not a number": Wrong(outside("Poisoned"), GRADIENTS, ("embedding.weight", "step 2")),
    "not clipped": Wrong(outside("Unclipped"), STEP, ("step 2",)),
    "of the step before": Wrong(outside("Stale"), STEP, ("step 2",)),
    # A mistake after the scenario is seen by the steps that close it.
    "late": Wrong(outside("LateForgetting"), STEP, ("step 3",)),
    "late, behind another scenario": Wrong(
        outside("LateForgetting", scenario="again"), STEP, ("step 3",)
    ),
    # Ranks that drift apart by a millionth.
    "drifting": Wrong(outside("Drifting"), "replicas", ("rank 1",), ("computed weights",)),
    "raising": Wrong(
        outside("Advising"),
        "runs to its end",
        ("RuntimeError: expected a norm, found none", "validate_engines.py"),
    ),
}


def of_thread(engine: str, check: str, says: str, **settings: Any) -> Wrong:
    case = Case(f"thread_bugs:{engine}", "no_shard", **{"microbatches": 3, **settings})
    return Wrong(case, check, (says,))


#: Bugs of public threads, with what the validator says of each.
THREADS = {
    "Megatron-LM#7566": of_thread("not_averaged", GRADIENTS, "own contribution"),
    "verl#7493": of_thread("fsdp_size_of_one", GRADIENTS, "own contribution"),
    "Megatron-LM#5956": of_thread(
        "ExpertsTimesTheirGroup",
        GRADIENTS,
        "2 times what",
        model="experts",
        ranks=4,
        microbatches=2,
    ),
    "Megatron-LM#5972": of_thread(
        "OuterStageLeftOut", GRADIENTS, "outer stage did", ranks=4, outer=2
    ),
    "Megatron-LM#6357": of_thread("FusedProductsOverwrite", GRADIENTS, "last microbatch"),
    "Fast-LLM#551": of_thread("SharedBuffersOverwrite", GRADIENTS, "last microbatch", ranks=1),
    "Megatron-LM#5974": of_thread("stepped_before", STEP, ""),
}


@pytest.fixture(scope="module")
def told(fork_server: ForkServer) -> dict[str, CaseVerdict]:
    """Verdicts on all wrong engines, by one set of ranks."""
    every = WRONG | THREADS
    verdicts = judged(fork_server, *(wrong.case for wrong in every.values()))
    return dict(zip(every, verdicts, strict=True))


@pytest.mark.parametrize("name", [*WRONG, *THREADS])
def test_a_wrong_engine_is_told_by_the_check_and_the_mistake_that_makes_it(
    told: dict[str, CaseVerdict], name: str
) -> None:
    verdict, wrong = told[name], (WRONG | THREADS)[name]
    checks, finding = found(verdict)
    assert checks[0] == wrong.check
    assert {*wrong.also} <= {*checks}
    text = "\n".join((finding.place, finding.found, *finding.evidence))
    assert [words for words in wrong.says if words not in text] == [], text
    frames = [line for line in finding.evidence if line.startswith("at ")]
    assert len(frames) == (1 if wrong.check == "runs to its end" else 0)
    assert all(
        check.finding.expected != check.finding.found for check in verdict.failures if check.finding
    )
    # Neither a reference nor the advice of an exception is part of what is told.
    said = [check.finding.expected for check in verdict.failures if check.finding]
    assert "nan" not in " ".join(said)
    assert "first." not in finding.found


def test_ranks_that_wait_for_each_other_end_with_their_stacks(fork_server: ForkServer) -> None:
    (hanging,) = judged(fork_server, outside("Waiting"), seconds=2.0)
    (after,) = judged(fork_server, outside("Replicating"))
    checks, finding = found(hanging)
    assert checks == ["runs to its end"]
    assert "no answer (limit 2 s)" in finding.found
    assert any("validate_engines.py" in line for line in finding.evidence)
    assert after.state == "passed"


def test_a_rank_that_spins_ends_by_its_processor_time(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "MOST_CPU_SECONDS", 1.5)
    (verdict,) = judged(fork_server, outside("Spinning"))
    _, finding = found(verdict)
    assert finding.found == "no answer (limit 1.5 s of processor time)"


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("engine", ["mfsdp", "fsdp2", "ddp", "single"])
def test_every_case_passes(fork_server: ForkServer, engine: str) -> None:
    failed = [v for v in judged(fork_server, *cases(engine, full=True)) if v.state == "failed"]
    assert failed == []
