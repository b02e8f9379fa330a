"""Each rule: a run that it stops, and the nearest run that it lets through."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rule_cases import CASES, H100, LAPTOP, RULE_IDS, SERVER, graph, on_cuda

from bench.errors import ConfigError, UnsupportedError
from bench.record import RunState
from bench.resolve import Machine, broken_rules, resolve
from bench.resolve.device_rules import MAX_THREADS_PER_CORE
from bench.resolve.machine import CudaDevice, described_machine
from bench.resolve.resolution import resolve_anywhere
from bench.spec import (
    DataSpec,
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    MeasureSpec,
    ModelSpec,
    RunSpec,
    TrainSpec,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "run-states.md").read_text()


def first_column(heading: str) -> list[str]:
    """Names in backquotes that start the rows of the first table behind `heading`."""
    table = PAGE.split(heading, maxsplit=1)[1].split("\n\n#", maxsplit=1)[0]
    return re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)


def test_the_table_of_states_lists_every_state() -> None:
    assert sorted(first_column("## Life of a run")) == sorted(get_args(RunState))


def test_the_bound_on_threads_per_core_is_the_documented_one() -> None:
    assert f"at most {MAX_THREADS_PER_CORE} threads per core" in PAGE


def test_every_rule_has_a_case_here() -> None:
    assert set(CASES) == set(RULE_IDS)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_stops_its_case_with_a_reason(rule: str) -> None:
    case = CASES[rule]
    reasons = dict(broken_rules(resolve_anywhere(case.stopped), case.machine))
    assert case.says in reasons[rule]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_lets_the_nearest_case_through(rule: str) -> None:
    case = CASES[rule]
    machine = case.machine_that_can or case.machine
    assert rule not in dict(broken_rules(resolve_anywhere(case.passes), machine))


def test_a_switch_of_the_other_front_is_refused_with_both_that_may_be_dropped() -> None:
    front = RunSpec(engine=EngineSpec(front="fsdp2", matrices="whole"))
    assert dict(broken_rules(resolve_anywhere(front), LAPTOP))["switch-not-in-engine"] == (
        "engine mfsdp with front=fsdp2 has no matrices=whole: drop engine.matrices, or"
        " engine.front=fsdp2"
    )


def test_resolve_raises_the_first_broken_rule_in_the_order_of_the_table() -> None:
    # Two rules are broken; the reason that no larger machine would cure comes first.
    spec = on_cuda(ranks=8, nccl_ub=True)
    assert [rule for rule, _ in broken_rules(resolve_anywhere(spec), LAPTOP)] == [
        "nccl-ub-needs-pool",
        "too-few-devices",
    ]
    with pytest.raises(UnsupportedError) as caught:
        resolve(spec, LAPTOP)
    assert caught.value.rule == "nccl-ub-needs-pool"


@pytest.mark.parametrize(
    ("name", "dtypes", "says"),
    [
        ("fsdp2", {"compute": "bf16", "main_params": "bf16"}, "dtypes.main_params to fp32"),
        ("fsdp2", {"compute": "bf16"}, "main_grads bf16 .left open, it is that of compute.: set"),
        ("ddp", {"compute": "bf16", "main_params": None}, "main_params none with compute bf16"),
        ("ddp", {"compute": "fp64", "main_grads": "fp32"}, "by autocast"),
        ("ddp", {"grad_comm": "fp64"}, "found grad_comm fp64"),
        ("single", {"grad_comm": "bf16"}, "dtypes.grad_comm to fp32 in its cells"),
        ("ddp", {"grad_comm": "bf16", "reduce": "fp32"}, "set dtypes.reduce to bf16"),
        ("mfsdp", {"reduce": "bf16"}, "hold at least what is sent, fp32"),
    ],
)
def test_a_dtype_policy_that_an_engine_cannot_follow_is_named(
    name: str, dtypes: dict, says: str
) -> None:
    ranks = 1 if name == "single" else 2
    spec = RunSpec(
        engine=EngineSpec(name=name), dtypes=DtypeSpec(**dtypes), launch=LaunchSpec(ranks=ranks)
    )
    with pytest.raises(UnsupportedError, match=says) as caught:
        resolve(spec, LAPTOP)
    assert caught.value.rule == "dtypes-not-in-engine"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transport": "native"}, "set dtypes.reduce to bf16, or engine.transport to auto"),
        ({"nccl_ub": True}, "with nccl_ub or cuda_graph adds up in the dtype of the wire, bf16"),
    ],
)
def test_sums_that_a_backend_cannot_take_are_refused_with_the_setting_that_it_can(
    settings: dict, says: str
) -> None:
    engine = EngineSpec(name="mfsdp", **settings)
    wide = {"main_grads": "fp32", "grad_comm": "bf16", "reduce": "fp32"}
    run = resolve_anywhere(RunSpec(engine=engine, dtypes=DtypeSpec(**wide)))
    assert says in dict(broken_rules(run, SERVER))["dtypes-not-in-engine"]
    as_sent = DtypeSpec(**wide | {"reduce": "bf16"})
    run = resolve_anywhere(RunSpec(engine=engine, dtypes=as_sent))
    assert "dtypes-not-in-engine" not in dict(broken_rules(run, SERVER))


@pytest.mark.parametrize(
    ("engine", "reduce"),
    [
        ({"name": "mfsdp"}, "fp32"),
        ({"name": "mfsdp", "transport": "native"}, "fp32"),
        ({"name": "mfsdp", "nccl_ub": True}, "bf16"),
        ({"name": "fsdp2"}, "bf16"),
        ({"name": "ddp"}, "bf16"),
    ],
)
def test_sums_are_as_the_gradients_where_the_engine_can_and_shown(
    engine: dict, reduce: str
) -> None:
    dtypes = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")
    run = resolve_anywhere(RunSpec(engine=EngineSpec(**engine), dtypes=dtypes))
    assert run.dtypes.reduce == reduce
    assert ("sum_fp32" in run.slug) == (reduce == "fp32")


def test_a_device_of_unknown_capability_is_not_refused() -> None:
    unknown = Machine(64, 2**40, cuda_devices=(CudaDevice("NVIDIA Something"),) * 8)
    resolve(on_cuda().model_copy(update={"dtypes": DtypeSpec(compute="bf16")}), unknown)


def test_a_folder_without_enough_text_is_not_data(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 64)
    spec = RunSpec(data=DataSpec(kind="text", path=str(tmp_path)))
    with pytest.raises(UnsupportedError, match="no more than one sequence of 64 bytes"):
        resolve(spec, LAPTOP)
    (tmp_path / "more.txt").write_text("x")
    resolve(spec, LAPTOP)


def test_on_cuda_too_little_memory_is_left_to_the_run_because_it_is_a_result() -> None:
    spec = on_cuda().model_copy(update={"model": ModelSpec(preset="llama3-70b")})
    small = Machine(8, 2**30, cuda_devices=(H100,) * 8)
    assert resolve(spec, small).shape.preset == "llama3-70b"


def test_what_a_node_must_hold_is_its_share_of_the_ranks() -> None:
    spec = RunSpec(
        launch=LaunchSpec(ranks=16, nodes=2, device="cuda"), train=TrainSpec(global_batch=32)
    )
    assert resolve(spec, replace(SERVER, nodes=2)).launch.ranks_per_node == 8
    with pytest.raises(UnsupportedError, match="needs 8 CUDA devices; a node has 0"):
        resolve(spec, replace(LAPTOP, nodes=2))
    with pytest.raises(ConfigError, match=r"launch.nodes: 16 ranks cannot be spread evenly over 3"):
        resolve(spec.model_copy(update={"launch": LaunchSpec(ranks=16, nodes=3)}), SERVER)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (graph(TrainSpec(global_batch=16, optimizer="sgd")), "train.optimizer=sgd"),
        (graph(nccl_ub=True), "NVIDIA/Megatron-LM#6154"),
        (graph(nccl_ub=True, manual_registration=True, symmetric_registration=False), "manual_reg"),
        (graph(recipe="mxfp8"), "recipe=mxfp8 (never captured)"),
        (graph().model_copy(update={"model": ModelSpec(preset="hybrid-tiny")}), "token counts"),
        (graph().model_copy(update={"measure": MeasureSpec(counts=True)}), "measure.counts cannot"),
        (graph().model_copy(update={"measure": MeasureSpec(profile="torch")}), "measure.profile="),
        (graph().model_copy(update={"measure": MeasureSpec(nvtx=True)}), "measure.nvtx"),
    ],
)
def test_what_a_graph_would_not_repeat_is_pruned_with_the_reason(run, said):
    with pytest.raises(UnsupportedError) as refused:
        resolve(run, SERVER)
    assert refused.value.rule.startswith("cuda-graph-")
    assert said in refused.value.reason


def test_ranges_for_another_tool_are_refused_beside_torchs_profiler():
    both = MeasureSpec(nvtx=True, profile="torch")
    with pytest.raises(ConfigError, match=r"measure.nvtx: .* takes CUPTI"):
        resolve(RunSpec(measure=both), LAPTOP)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [  # 70.55e9 parameters: FP32 weights, gradients and two moments; BF16 or codes beside them
        ({"strategy": "optim_grads_params"}, 16 * 70.55 / 8),
        ({"strategy": "optim_grads_params", "outer_size": 2, "outer_strategy": "optim"}, None),
        ({"strategy": "optim_grads"}, 16 * 70.55 / 16 + 2 * 70.55),
        ({"strategy": "optim_grads", "recipe": "current"}, 16 * 70.55 / 16 + 70.55),
        ({"strategy": "optim_grads_params"}, None),
    ],
    ids=["8 ranks", "hfsdp", "whole compute weights", "whole codes", "16 ranks"],
)
def test_what_does_not_fit_at_rest_is_pruned_with_its_bytes(fields, needed, request):
    ranks = 8 if request.node.callspec.id == "8 ranks" else 16
    spec = RunSpec(
        model=ModelSpec(preset="llama3-70b"),
        engine=EngineSpec(name="mfsdp", **fields),
        dtypes=DtypeSpec(compute="bf16", main_params="fp32", main_grads="fp32"),
        train=TrainSpec(global_batch=16, micro_batch=1),
        launch=LaunchSpec(ranks=ranks, nodes=ranks // 8, device="cuda"),
    )
    machine = described_machine("H100", ranks)
    if needed is None:
        resolve(spec, machine)
        return
    with pytest.raises(UnsupportedError) as refused:
        resolve(spec, machine)
    assert refused.value.rule == "not-enough-memory"
    assert f"at least {needed * 1e9 / 2**30:.1f} GiB" in refused.value.reason


def test_settings_of_nccl_become_its_variables_and_are_said_once():
    launch = LaunchSpec(device="cuda", copy_engine=True, nvls="off", collnet="on")
    assert launch.nccl_variables == {
        "NCCL_CTA_POLICY": "2",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_COLLNET_ENABLE": "1",
    }
    twice = launch.model_copy(update={"env": {"NCCL_NVLS_ENABLE": "1"}})
    with pytest.raises(ConfigError, match="NCCL_NVLS_ENABLE is '1' there, and '0' by"):
        resolve_anywhere(RunSpec(launch=twice))
