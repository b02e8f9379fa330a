"""DeepSpeed hands the optimizer the gradients of the others, clips by their norm, and trains."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve_anywhere
from bench.resolve.rules import broken_rules
from bench.spec import (
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    ResolvedRun,
    RunSpec,
    TrainSpec,
    known_engine,
)
from bench.testing.workers import ForkServer
from bench.validate.cases import Case
from bench.validate.matrix import cases
from bench.validate.session import MODULES, WorkerSettings, verdicts

here = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
TRAIN = TrainSpec(steps=4, global_batch=8, micro_batch=2, seq_len=32, lr=2e-3, checkpoint_every=4)


def run(engine: str = "deepspeed", strategy: str | None = None, **dtypes: str) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug", layers=2),
            engine=EngineSpec(name=engine, strategy=strategy),
            dtypes=DtypeSpec(**dtypes),
            train=TRAIN,
            launch=LaunchSpec(ranks=1 if engine == "single" else 2),
        )
    )


@pytest.mark.processes
@here
def test_every_stage_passes_validation():
    asked = [Case("deepspeed", one, policy="fp32", microbatches=2) for one in STRATEGIES]
    asked.append(Case("deepspeed", "optim_grads_params", policy="bf16", microbatches=2))
    with ForkServer(modules=MODULES) as server:
        for verdict in verdicts(server, asked, WorkerSettings(case_seconds=100.0)):
            assert verdict.state == "passed", (verdict.case, verdict.failures, verdict.reason)


@pytest.mark.processes
@here
def test_losses_and_norms_are_those_of_a_single_process(run_cells, tmp_path):
    cells = run_cells(tmp_path, {"single": run("single")})
    cells |= run_cells(tmp_path, {"zero3": run(strategy="optim_grads_params")})
    assert cells["zero3"].losses == pytest.approx(cells["single"].losses, rel=1e-5)
    assert cells["zero3"].norms == pytest.approx(cells["single"].norms, rel=1e-4)
    held = cells["zero3"].document("memory.json")["by_category_bytes"]
    assert held["optimizer_state"] == pytest.approx(2 * held["main_weights"], rel=0.01)
    assert cells["zero3"].document("checkpoints.json")["saves"]


def test_what_it_cannot_follow_is_pruned_in_words():
    def reasons(resolved: ResolvedRun) -> str:
        return " ".join(text for _, text in broken_rules(resolved, Machine.detect()))

    assert "offers the strategy" in reasons(run(strategy="no_shard"))
    assert "matched on FP32 main weights" in reasons(run(compute="bf16", main_params="bf16"))
    assert "by autocast" in reasons(run(compute="fp16", main_grads="fp32", grad_comm="fp32"))


def test_an_engine_that_is_not_installed_is_pruned_with_the_command_that_installs_it(monkeypatch):
    from bench.resolve import engine_rules

    engine_rules._why_not_here.cache_clear()
    monkeypatch.setattr(engine_rules, "locate", lambda name: None if name == "deepspeed" else name)
    reasons = dict(broken_rules(run(), Machine.detect()))
    engine_rules._why_not_here.cache_clear()
    assert reasons["engine-not-here"].endswith(known_engine("deepspeed").install)


def test_cases_are_asked_in_a_dtype_that_the_engine_knows():
    assert {case.policy for case in cases("deepspeed", full=False) if isinstance(case, Case)} == {
        "fp32",
        "bf16",
        "bf16_wire",
        "bf16_sum",
    }
