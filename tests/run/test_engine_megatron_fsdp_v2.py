"""The adapter of the second megatron_fsdp: the package itself on CPU ranks, beside plain torch."""

from __future__ import annotations

import pytest

from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve_anywhere
from bench.resolve.rules import broken_rules
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, ModelSpec, RunSpec
from bench.testing.workers import ForkServer
from bench.validate.cases import Case
from bench.validate.session import WorkerSettings, verdicts

ON_CPU = "megatron_fsdp_v2_on_cpu:build"
ALL = "optim_grads_params"
RIGHT = (
    Case(ON_CPU, ALL, microbatches=3, policy="bf16"),
    Case(ON_CPU, ALL, model="uneven", policy="fp64"),
    Case(ON_CPU, ALL, ranks=4, outer=2, microbatches=3, policy="fp64"),
)


@pytest.mark.processes
@pytest.mark.needs("megatron_fsdp")
def test_the_package_itself_trains_as_plain_torch_does(fork_server: ForkServer) -> None:
    tied = Case(ON_CPU, ALL, model="tied")
    found = list(verdicts(fork_server, (*RIGHT, tied), WorkerSettings(case_seconds=100.0)))
    for verdict in found[:-1]:
        assert {c.check for c in verdict.failures} == {"freed after deletion"}, verdict
        done = {c.check for c in verdict.checks if c.state == "passed"}
        assert {"losses", "gradients", "norm and clipping", "optimizer step"} <= done
    assert found[-1].state == "not_applicable"
    assert "cannot tie weights" in found[-1].reason


@pytest.mark.parametrize(
    ("engine", "dtypes", "rule", "words"),
    [
        ({}, {"grad_comm": "fp32"}, "dtypes-not-in-engine", "set dtypes.grad_comm to bf16"),
        ({"strategy": "optim_grads"}, {}, "strategy-not-in-engine", "optim_grads_params"),
        ({"outer_size": 2, "outer_strategy": "optim"}, {}, "strategy-not-in-engine", "no_shard"),
    ],
)
def test_a_plan_says_what_it_does_not_offer(engine, dtypes, rule, words):
    run = RunSpec(
        model=ModelSpec(preset="debug", layers=1),
        engine=EngineSpec.model_validate({"name": "megatron_fsdp_v2", **engine}),
        dtypes=DtypeSpec(**{"compute": "bf16", "grad_comm": "bf16", **dtypes}),
        launch=LaunchSpec(ranks=4),
    )
    reasons = dict(broken_rules(resolve_anywhere(run), Machine.detect()))
    assert words in reasons[rule]
