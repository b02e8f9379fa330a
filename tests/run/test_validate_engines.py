"""`validate` passes right engines, and says what is wrong with wrong ones, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.known_failures import of_case
from bench.testing.workers import ForkServer
from bench.validate import applicability, ranks, session
from bench.validate.cases import Case
from bench.validate.matrix import cases
from bench.validate.session import WorkerSettings, verdicts
from bench.verdict import CaseVerdict, Finding

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
SAMPLE = (
    Case("mfsdp", "optim_grads_params", microbatches=2),
    Case("mfsdp", "optim", model="tied", policy="bf16_wire"),
    Case("mfsdp", "optim_grads_params", ranks=4, outer=2, outer_strategy="optim", policy="bf16"),
    Case("fsdp1", "optim_grads_params", model="rooted", microbatches=2),
    Case("fsdp2", "optim_grads_params", model="rooted", microbatches=2),
    Case("fsdp2", "optim_grads_params", ranks=4, reshard=2, microbatches=2),
    Case("ddp", "no_shard", policy="bf16"),
    # What was reduced before the further pass is rounded once more with it.
    Case("ddp", "no_shard", "recomputed", "bf16", microbatches=3, scenario="again"),
    Case("single", "no_shard", ranks=1, microbatches=2),
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
    for verdict in judged(fork_server, *SAMPLE, outside("Replicating")):
        assert verdict.state == "passed", (verdict.case, verdict.failures, verdict.reason)


def test_what_an_engine_refuses_is_not_applicable_with_its_reason(fork_server: ForkServer) -> None:
    case = Case("validate_engines:Replicating", "optim")
    (verdict,) = judged(fork_server, case)
    assert (verdict.state, verdict.reason) == (
        "not_applicable",
        "this engine replicates on one axis",
    )


def test_weights_that_stayed_gathered_after_an_evaluation_are_loaded_into(
    fork_server: ForkServer,
) -> None:
    case = Case("fsdp2", "optim_grads", policy="fp32", microbatches=3, scenario="reloaded")
    (verdict,) = judged(fork_server, case)
    known = of_case("fsdp2", case.id, verdict.failures)
    assert known is not None, verdict.failures
    assert known.does == "a state dict that lacks an entry is loaded"


def test_a_case_whose_optional_package_is_absent_is_skipped_in_words(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applicability, "locate", lambda _name: None)
    monkeypatch.setattr(session, "run_on", lambda *_: pytest.fail("it was asked all the same"))
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
    assert finding.found.startswith("low-precision gathers were asked for and not made: bfloat16")


def test_a_wrong_divisor_is_told_as_what_every_contribution_counts(fork_server: ForkServer) -> None:
    (verdict,) = judged(fork_server, outside("Summing"))
    checks, finding = found(verdict)
    assert checks == ["gradients"]
    assert (finding.step, finding.microbatch, finding.rank) == (1, 1, 0)
    assert "every rank's gradient of microbatch 1 counts 1 times, expected 0.5" in finding.evidence


def test_a_lost_microbatch_is_named(fork_server: ForkServer) -> None:
    (verdict,) = judged(fork_server, outside("Forgetting", microbatches=3))
    _, finding = found(verdict)
    assert finding.microbatch == 1
    lost = [line for line in finding.evidence if " counts 0 times" in line]
    assert [line.split(" counts")[0][-1] for line in lost] == ["1", "2"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("Undivided", "as if not divided by the ranks"),
        pytest.param("DividedTwice", "as if divided by the ranks twice", marks=pytest.mark.nightly),
        pytest.param(
            "DividedByMicrobatches", "as if divided by the microbatches", marks=pytest.mark.nightly
        ),
        ("WithoutOneRank", "as if rank 1's contribution was lost"),
        pytest.param("WithoutFirst", "as if microbatch 1 was lost", marks=pytest.mark.nightly),
        pytest.param("WithoutMiddle", "as if microbatch 2 was lost", marks=pytest.mark.nightly),
        pytest.param(
            "Forgetting", "as if the last microbatch alone was kept", marks=pytest.mark.nightly
        ),
        ("PartialSums", "as if the accumulator was reduced after every microbatch"),
    ],
)
def test_a_wrong_gradient_is_told_as_the_mistake_that_makes_it(
    fork_server: ForkServer, engine: str, said: str
) -> None:
    (verdict,) = judged(fork_server, outside(engine, microbatches=3))
    checks, finding = found(verdict)
    assert checks[0] == "gradients"
    assert any(said in line for line in finding.evidence[:2])


@pytest.mark.parametrize(
    ("engine", "step", "said"),
    [
        ("Unclipped", 2, "as if not clipped"),
        pytest.param("Undecayed", 1, "as if without weight decay", marks=pytest.mark.nightly),
        pytest.param(
            "Forgetful",
            2,
            "as if the moments of the steps before were lost",
            marks=pytest.mark.nightly,
        ),
        ("Stale", 2, "as if the gradients of the step before were used again"),
    ],
)
def test_a_wrong_step_is_told_as_the_mistake_that_makes_it(
    fork_server: ForkServer, engine: str, step: int, said: str
) -> None:
    (verdict,) = judged(fork_server, outside(engine))
    checks, finding = found(verdict)
    assert checks[0] == "optimizer step"
    assert finding.step == step
    assert [line for line in finding.evidence if line.startswith("as if")] == [
        next(line for line in finding.evidence if line.startswith(said))
    ]


def test_gradients_of_the_step_before_are_recognised(fork_server: ForkServer) -> None:
    (verdict,) = judged(fork_server, outside("Keeping"))
    _, finding = found(verdict)
    assert finding.step == 2
    assert "it holds 1 times the gradient of the step before" in finding.evidence


def test_a_rank_that_drifts_by_a_millionth_is_named(fork_server: ForkServer) -> None:
    (verdict,) = judged(fork_server, outside("Drifting"))
    checks, finding = found(verdict)
    assert "replicas" in checks
    assert "computed weights" in checks
    assert finding.rank == 1


def test_ranks_that_wait_for_each_other_end_with_their_stacks(fork_server: ForkServer) -> None:
    (hanging,) = judged(fork_server, outside("Waiting"), seconds=4.0)
    (after,) = judged(fork_server, outside("Replicating"))
    checks, finding = found(hanging)
    assert checks == ["runs to its end"]
    assert "no answer (limit 4 s)" in finding.found
    assert any("validate_engines.py" in line for line in finding.evidence)
    assert after.state == "passed"


def test_a_poisoned_step_is_told_where_it_begins_and_no_reference_is_poisoned(
    fork_server: ForkServer,
) -> None:
    (verdict,) = judged(fork_server, outside("Poisoned"))
    checks, finding = found(verdict)
    assert (checks[0], finding.step, finding.parameter) == ("gradients", 2, "embedding.weight")
    said = [check.finding.expected for check in verdict.failures if check.finding]
    assert "nan" not in " ".join(said)


def test_an_exception_is_told_without_its_advice(fork_server: ForkServer) -> None:
    (verdict,) = judged(fork_server, outside("Advising"))
    _, finding = found(verdict)
    assert finding.found == "RuntimeError: expected a norm, found none"
    frames = [line for line in finding.evidence if line.startswith("at ")]
    assert len(frames) == 1
    assert "validate_engines.py" in frames[0]


def test_a_rank_that_spins_ends_by_its_processor_time(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "MOST_CPU_SECONDS", 1.5)
    (verdict,) = judged(fork_server, outside("Spinning"))
    _, finding = found(verdict)
    assert finding.found == "no answer (limit 1.5 s of processor time)"


def test_a_mistake_after_the_scenario_is_seen_by_the_steps_that_close_it(
    fork_server: ForkServer,
) -> None:
    for scenario in ("train", "again"):
        (verdict,) = judged(fork_server, outside("LateForgetting", scenario=scenario))
        checks, finding = found(verdict)
        assert (checks[0], finding.step) == ("optimizer step", 3)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("engine", ["mfsdp", "fsdp2", "fsdp1", "ddp", "single"])
def test_every_case_passes(fork_server: ForkServer, engine: str) -> None:
    failed = [v for v in judged(fork_server, *cases(engine, full=True)) if v.state == "failed"]
    assert failed == []
