"""Each rule: a run that it stops, and the nearest run that it lets through."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.errors import ConfigError, UnsupportedError
from bench.resolve import RULES, Machine, broken_rules, resolve
from bench.resolve.cuda_devices import CudaDevice
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

H100 = CudaDevice("NVIDIA H100 80GB HBM3", capability=(9, 0))
V100 = CudaDevice("Tesla V100-SXM2-16GB", capability=(7, 0))
LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
SERVER = Machine(cpu_count=64, memory_bytes=2**40, cuda_devices=(H100,) * 8)
OLD_SERVER = Machine(cpu_count=64, memory_bytes=2**40, cuda_devices=(V100,) * 8)


@dataclass(frozen=True)
class Case:
    stopped: RunSpec
    passes: RunSpec
    says: str
    machine: Machine = LAPTOP
    machine_that_can: Machine | None = None


def engine(name: str = "mfsdp", **fields: object) -> RunSpec:
    return RunSpec(engine=EngineSpec(name=name, **fields))


def on_cuda(ranks: int = 8, **fields: object) -> RunSpec:
    return RunSpec(
        engine=EngineSpec(**fields),
        launch=LaunchSpec(ranks=ranks, device="cuda"),
        train=TrainSpec(global_batch=16, micro_batch=2),
    )


def ddp_dtypes(**fields: object) -> RunSpec:
    return RunSpec(engine=EngineSpec(name="ddp"), dtypes=DtypeSpec(**fields))


POOL = {"nccl_ub": True, "double_buffer": True, "allocator": "max_pool"}

LAUNCH = ("copy_engine", "nvls", "collnet", "ranks_per_device")


def launched(**fields: object) -> RunSpec:
    own = {name: fields.pop(name) for name in LAUNCH if name in fields}
    spec = on_cuda(**fields)
    return spec.model_copy(update={"launch": spec.launch.model_copy(update=own)})


def collective(measure: MeasureSpec | None = None, **settings: object) -> RunSpec:
    own = {
        name: settings.pop(name)
        for name in ("ranks", "device", "copy_engine", "nodes")
        if name in settings
    }
    return RunSpec(
        engine=EngineSpec(name="collective", **settings),
        launch=LaunchSpec(**own),
        measure=measure or MeasureSpec(),
    )


GRAPH = {"cuda_graph": True, "double_buffer": True, "allocator": "fixed_pool"}


SIXTEEN = TrainSpec(global_batch=16)


def graph(train: TrainSpec = SIXTEEN, **fields: object) -> RunSpec:
    return on_cuda(**{**GRAPH, **fields}).model_copy(update={"train": train})


PRECISION_AWARE = TrainSpec(optimizer="precision_aware_adamw")
REMAINDERS = PRECISION_AWARE.model_copy(update={"store_remainders": True})

CASES = {
    "strategy-not-in-engine": Case(
        engine("ddp", strategy="optim"),
        engine("ddp", strategy="no_shard"),
        "engine ddp offers the strategy no_shard, not optim",
    ),
    "engine-not-on-device": Case(
        engine("megatron_fsdp"),
        engine("mfsdp"),
        "engine megatron_fsdp runs on cuda; found device cpu",
    ),
    "single-has-one-rank": Case(
        engine("single"),
        engine("single").model_copy(update={"launch": LaunchSpec(ranks=1)}),
        "set launch.ranks to 1",
    ),
    "switch-not-in-engine": Case(
        engine("fsdp2", allocator="temporary", overlap_param_gather=False),
        engine("fsdp2"),
        "engine fsdp2 has no allocator=temporary, overlap_param_gather=False",
    ),
    "outer-strategy-needs-outer-axis": Case(
        engine(outer_strategy="optim"),
        engine(outer_strategy="optim", outer_size=2),
        "set outer_size to a divisor",
    ),
    "outer-needs-inner-sharding": Case(
        engine(strategy="no_shard", outer_strategy="optim", outer_size=2),
        engine(strategy="no_shard"),
        "use optim, optim_grads or optim_grads_params",
    ),
    "no-overlap-needs-whole-gradients": Case(
        engine(strategy="optim_grads", overlap_grad_reduce=False),
        engine(strategy="optim", overlap_grad_reduce=False),
        "optim_grads keeps only a shard",
    ),
    "decoupled-gradients-need-a-reader": Case(
        engine(decoupled_grad=True),
        engine(decoupled_grad=True).model_copy(update={"train": PRECISION_AWARE}),
        "set train.optimizer to precision_aware_adamw",
    ),
    "optimizer-has-no-such-state": Case(
        RunSpec(train=TrainSpec(master_weights=True)),
        RunSpec(train=PRECISION_AWARE.model_copy(update={"master_weights": True})),
        "the optimizer adamw has no master_weights=True",
    ),
    "remainders-need-bf16-weights": Case(
        RunSpec(train=REMAINDERS),
        RunSpec(train=REMAINDERS, dtypes=DtypeSpec(compute="bf16", main_params="bf16")),
        "set dtypes.main_params to bf16",
    ),
    "gather-precision-without-recipe": Case(
        engine(recipe="mxfp8", gather_precision="compute"),
        engine(recipe="block", gather_precision="compute"),
        "set gather_precision to recipe",
    ),
    "recompute-inside-of-a-unit": Case(
        RunSpec(
            model=ModelSpec(recompute="selective"),
            engine=EngineSpec(recipe="mxfp8", fine_grained_gather=False),
        ),
        RunSpec(model=ModelSpec(recompute="selective"), engine=EngineSpec(recipe="mxfp8")),
        "set engine.fine_grained_gather to true",
    ),
    "dtypes-not-in-engine": Case(
        ddp_dtypes(compute="bf16", main_grads="bf16"),
        ddp_dtypes(compute="bf16", main_grads="fp32", grad_comm="bf16"),
        "set dtypes.main_grads to fp32",
    ),
    "collective-needs-ranks": Case(collective(ranks=1), collective(), "set launch.ranks to 2"),
    "collective-is-only-timed": Case(
        collective(MeasureSpec(counts=True)),
        collective(MeasureSpec(nccl="evidence")),
        "measure.counts=true looks into training steps",
    ),
    "transport-has-no-broadcast": Case(
        collective(operation="broadcast", transport="point_to_point"),
        collective(operation="broadcast"),
        "transport point_to_point has no broadcast of its own",
    ),
    "same-host-needs-a-host": Case(
        collective(transport="same_host", nodes=2),
        collective(transport="same_host"),
        "on the same host; found 2 nodes",
    ),
    "registration-needs-nccl": Case(
        collective(registration="symmetric"),
        collective(registration="symmetric", device="cuda"),
        "registers memory with NCCL; found device cpu",
    ),
    "copy-engine-only-gathers": Case(
        collective(
            operation="all_reduce", registration="symmetric", device="cuda", copy_engine=True
        ),
        collective(registration="symmetric", device="cuda", copy_engine=True),
        "does gathers only; found operation all_reduce",
    ),
    "nccl-ub-needs-cuda": Case(
        engine(**POOL), engine(), "nccl_ub registers buffers with NCCL; found device cpu"
    ),
    "nccl-ub-needs-sum": Case(
        on_cuda(**POOL, average_in_collective=True),
        on_cuda(average_in_collective=True),
        "average_in_collective=False",
        SERVER,
    ),
    "nccl-ub-needs-pool": Case(
        on_cuda(nccl_ub=True),
        on_cuda(),
        "found double_buffer=False, allocator=storage_resize",
        SERVER,
    ),
    "cuda-graph-needs-cuda": Case(engine(**GRAPH), engine(), "use cuda"),
    "cuda-graph-needs-fixed-memory": Case(
        graph(allocator="storage_resize", double_buffer=False),
        graph(),
        "needs double_buffer=True with an allocator that never moves buffers",
        SERVER,
    ),
    "cuda-graph-keeps-the-host-out": Case(
        graph(nan_check=True, transport="point_to_point"),
        graph(transport="native"),
        "nan_check=true (reads every gradient on the host), nor transport=point_to_point",
        SERVER,
    ),
    "cuda-graph-hides-operations": Case(
        graph(TrainSpec(global_batch=16, steps=5)),
        graph(TrainSpec(global_batch=16, steps=6)),
        "nothing would be replayed",
        SERVER,
    ),
    "nccl-settings-need-cuda": Case(
        RunSpec(launch=LaunchSpec(nvls="off", collnet="on")),
        RunSpec(launch=LaunchSpec()),
        "launch.nvls=off and launch.collnet=on speak to NCCL",
    ),
    "copy-engine-needs-windows": Case(
        launched(copy_engine=True),
        launched(copy_engine=True, **POOL),
        "use engine mfsdp with nccl_ub=true",
        SERVER,
    ),
    "nvls-needs-devices-of-their-own": Case(
        launched(nvls="on", ranks_per_device=2),
        launched(ranks_per_device=2),
        "does not start with NVLS where ranks share a device",
        SERVER,
    ),
    "pool-slots-need-pool": Case(
        engine(pool_slots=3), engine(pool_slots=3, allocator="max_pool"), "found allocator storage"
    ),
    "double-buffer-needs-pool": Case(
        engine(double_buffer=True), engine(), "use fixed_pool or max_pool"
    ),
    "registration-needs-nccl-ub": Case(
        on_cuda(manual_registration=True),
        on_cuda(manual_registration=True, symmetric_registration=False, **POOL),
        "manual_registration=True is about NCCL user buffers",
        SERVER,
    ),
    "recipe-not-built": Case(
        engine(recipe="nvfp4"), engine(recipe="mxfp8"), "planned only (one gather: "
    ),
    "engine-not-here": Case(
        engine("validate_engines:Replicatng"),
        engine("validate_engines:Replicating"),
        "defines no Replicatng: it has ",
    ),
    "too-few-nodes": Case(
        RunSpec(launch=LaunchSpec(ranks=2, nodes=2)),
        RunSpec(launch=LaunchSpec(ranks=2, nodes=2)),
        "needs 2 nodes; found 1: run it on a cluster (--launcher slurm)",
        LAPTOP,
        replace(LAPTOP, nodes=2),
    ),
    "too-few-devices": Case(
        on_cuda(ranks=8),
        on_cuda(ranks=8),
        "needs 8 CUDA devices; this machine shows 0",
        LAPTOP,
        SERVER,
    ),
    "too-many-cpu-ranks": Case(
        RunSpec(launch=LaunchSpec(ranks=16), train=TrainSpec(global_batch=32)),
        RunSpec(launch=LaunchSpec(ranks=8), train=TrainSpec(global_batch=32)),
        "16 threads on 2 cores; at most 4 per core, 8 here",
    ),
    "dtype-not-on-device": Case(
        on_cuda().model_copy(update={"dtypes": DtypeSpec(compute="bf16")}),
        on_cuda().model_copy(update={"dtypes": DtypeSpec(compute="bf16")}),
        "device 0 (Tesla V100-SXM2-16GB) has 7.0",
        OLD_SERVER,
        SERVER,
    ),
    "not-enough-memory": Case(
        RunSpec(model=ModelSpec(preset="llama3-8b")),
        RunSpec(model=ModelSpec(preset="160m")),
        "llama3-8b needs at least 127.5 GiB",
    ),
    "model-not-here": Case(
        RunSpec(model=ModelSpec(factory="toy_model_that_is_not_there:build")),
        RunSpec(model=ModelSpec(factory="toy_model:build")),
        "no module toy_model_that_is_not_there in ",
    ),
    "data-not-here": Case(
        RunSpec(data=DataSpec(kind="text", path="/nowhere/at/all")),
        RunSpec(data=DataSpec(kind="text", path=__file__)),
        "there is nothing at this path",
    ),
}


def test_every_rule_has_a_case_here() -> None:
    assert set(CASES) == {rule.id for rule in RULES}


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


@pytest.mark.parametrize("allocator", ["temporary", "fixed_pool", "max_pool"])
def test_every_allocator_can_be_an_axis_by_itself(allocator: str) -> None:
    assert broken_rules(resolve_anywhere(engine(allocator=allocator)), LAPTOP) == []


@pytest.mark.parametrize(
    ("name", "dtypes", "says"),
    [
        ("fsdp2", {"compute": "bf16", "main_params": "bf16"}, "dtypes.main_params to fp32"),
        ("fsdp2", {"compute": "bf16"}, "main_grads bf16: set dtypes.main_grads to fp32"),
        ("ddp", {"compute": "bf16", "main_params": None}, "main_params none with compute bf16"),
        ("ddp", {"compute": "fp64", "main_grads": "fp32"}, "by autocast"),
        ("ddp", {"grad_comm": "fp64"}, "found grad_comm fp64"),
        ("single", {"grad_comm": "bf16"}, "dtypes.grad_comm to fp32 in its cells"),
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


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "mfsdp"])
@pytest.mark.parametrize(
    "dtypes",
    [
        {"compute": "fp32"},
        {"compute": "bf16", "main_grads": "fp32"},
        {"compute": "bf16", "main_grads": "fp32", "grad_comm": "bf16"},
        {"compute": "fp64", "main_params": "fp64"},
    ],
)
def test_the_policies_that_all_engines_can_follow_are_pruned_nowhere(
    name: str, dtypes: dict
) -> None:
    resolve(RunSpec(engine=EngineSpec(name=name), dtypes=DtypeSpec(**dtypes)), LAPTOP)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_torch_computes_on_the_cpu_in_every_dtype_that_a_spec_can_name(dtype: str) -> None:
    # The dtype rule refuses nothing on CPU; this is the ground it stands on.
    import torch

    kind = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }[dtype]
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=kind))
    query = (torch.ones(1, 2, 4, 8, dtype=kind) @ weight).requires_grad_()
    attended = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    logits = attended.reshape(8, 8)
    torch.nn.functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long)).backward()
    torch.optim.AdamW([weight], lr=0.1).step()
    assert weight.grad is not None
    assert weight.isfinite().all()


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
        (graph().model_copy(update={"model": ModelSpec(recompute="full")}), "recompute=full"),
        (graph().model_copy(update={"measure": MeasureSpec(counts=True)}), "measure.counts cannot"),
        (graph().model_copy(update={"measure": MeasureSpec(profile="torch")}), "measure.profile="),
    ],
)
def test_what_a_graph_would_not_repeat_is_pruned_with_the_reason(run, said):
    with pytest.raises(UnsupportedError) as refused:
        resolve(run, SERVER)
    assert refused.value.rule.startswith("cuda-graph-")
    assert said in refused.value.reason


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": TrainSpec(seq_len=32)}, "train.seq_len: engine collective times one operation"),
        ({"model": ModelSpec(preset="tiny")}, "would read 'tiny'; leave it out"),
        ({"dtypes": DtypeSpec(grad_comm="bf16")}, "dtypes.grad_comm: engine collective"),
        ({"data": DataSpec(seed=3)}, "data.seed"),
        (
            {"engine": EngineSpec(name="collective", size_bytes=1001)},
            "1001 bytes cannot be split into equal numbers of fp32 elements of 2 ranks; the nearest"
            " that can: 1000 or 1008",
        ),
    ],
)
def test_a_collective_with_settings_that_nobody_reads_is_refused(changed, said) -> None:
    spec = collective().model_copy(update=changed)
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve_anywhere(spec)


def test_a_collective_is_named_by_what_it_does_and_has_one_dtype() -> None:
    run = resolve_anywhere(collective(size_bytes=8 << 20, operation="reduce_scatter"))
    assert run.slug == "reduce_scatter-8MiB-collective-plain-native-fp32-2xcpu"
    assert {run.dtypes.compute, run.dtypes.main_grads, run.dtypes.grad_comm} == {"fp32"}
    assert (run.shape, run.tokens_per_step, run.work_per_step) == (None, 0, 8 << 20)


def test_buffers_that_cannot_fit_are_pruned() -> None:
    with pytest.raises(UnsupportedError, match=r"needs at least 32.0 GiB for its buffers"):
        resolve(collective(size_bytes=8 << 30), LAPTOP)
