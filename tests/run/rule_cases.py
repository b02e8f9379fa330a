"""For each rule, a run that it stops and the nearest one that it lets through."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace

from small_runs import LAPTOP

from bench.resolve import RULES, Machine
from bench.resolve.machine import CudaDevice
from bench.spec import (
    DataSpec,
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    RunSpec,
    TrainSpec,
)

#: Every rule that some topic yields, in the order in which they are asked.
RULE_IDS = list(
    dict.fromkeys(
        found
        for topic in RULES
        for found in re.findall(r'yield \(?\s*"([\w-]+)"', inspect.getsource(topic))
    )
)

H100 = CudaDevice("NVIDIA H100 80GB HBM3", capability=(9, 0))
V100 = CudaDevice("Tesla V100-SXM2-16GB", capability=(7, 0))
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


GRAPH = {"cuda_graph": True, "double_buffer": True, "allocator": "fixed_pool"}


SIXTEEN = TrainSpec(global_batch=16)


def graph(train: TrainSpec = SIXTEEN, **fields: object) -> RunSpec:
    return on_cuda(**{**GRAPH, **fields}).model_copy(update={"train": train})


def layers(kind: str, name: str = "mfsdp", device: str = "cpu", **model: object) -> RunSpec:
    return RunSpec(
        model=ModelSpec(linear=kind, **model),
        engine=EngineSpec(name=name),
        launch=LaunchSpec(device=device),
    )


EXPERTS = ModelSpec(preset="hybrid-tiny", experts=3)
PRECISION_AWARE = TrainSpec(optimizer="precision_aware_adamw")
MUON = TrainSpec(optimizer="muon")
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
    "megatron-fsdp-lacks": Case(
        engine("megatron_fsdp", allocator="temporary"),
        engine("megatron_fsdp"),
        "megatron-fsdp 0.6.1 resizes storages, or serves units from pools; found allocator",
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
    "optimizer-needs-whole-matrices": Case(
        engine("mfsdp", front="fsdp2").model_copy(update={"train": MUON}),
        engine("mfsdp", matrices="whole").model_copy(update={"train": MUON}),
        "is not known to give its optimizer any: drop train.optimizer=muon or engine.front=fsdp2",
    ),
    "parallelism-not-in-engine": Case(
        engine("ddp", tensor_parallel=2),
        engine("fsdp2", tensor_parallel=2),
        "engine ddp has no tensor_parallel=2",
    ),
    "tensor-parallel-cuts-evenly": Case(
        RunSpec(model=ModelSpec(kv_heads=1), engine=EngineSpec(tensor_parallel=2)),
        engine(tensor_parallel=2),
        "found kv_heads 1: choose a divisor",
    ),
    "expert-parallel-spreads-evenly": Case(
        RunSpec(model=EXPERTS, engine=EngineSpec(expert_parallel=2)),
        RunSpec(
            model=EXPERTS.model_copy(update={"experts": 4}), engine=EngineSpec(expert_parallel=2)
        ),
        "found 3: choose a divisor of it",
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
    "outer-axis-leaves-ranks-to-shard": Case(
        engine("fsdp2", outer_size=2),
        RunSpec(engine=EngineSpec(name="fsdp2", outer_size=2), launch=LaunchSpec(ranks=4)),
        "or the engine ddp",
        machine=SERVER,
    ),
    "no-overlap-needs-whole-gradients": Case(
        engine(strategy="optim_grads", overlap_grad_reduce=False),
        engine(strategy="optim", overlap_grad_reduce=False),
        "optim_grads keeps only a shard",
    ),
    "resharding-to-a-part": Case(
        engine("fsdp2", reshard_after_forward=2),
        RunSpec(
            engine=EngineSpec(name="fsdp2", reshard_after_forward=2), launch=LaunchSpec(ranks=4)
        ),
        "found 2 with optim_grads_params on 2 ranks",
        machine=SERVER,
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
    "fused-adam-needs-cuda": Case(
        RunSpec(train=TrainSpec(optimizer="fused_adam")),
        RunSpec(train=PRECISION_AWARE),
        "fused_adam computes on CUDA",
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
    "offload-leaves-the-device": Case(
        engine(offload=True, recipe="current"),
        engine(offload=True),
        "recipe=current: leave one out",
    ),
    "registration-needs-nccl-ub": Case(
        on_cuda(manual_registration=True),
        on_cuda(manual_registration=True, symmetric_registration=False, **POOL),
        "manual_registration=True is about NCCL user buffers",
        SERVER,
    ),
    "linear-has-no-such-recipe": Case(
        layers("torch", linear_recipe="mxfp8"),
        layers("torch"),
        "linear layers of torch know the recipes none, not mxfp8",
    ),
    "linear-beside-the-engine": Case(
        layers("transformer_engine", "ddp", quantised_weights=True),
        layers("transformer_engine", "ddp"),
        "engine ddp gathers no codes of transformer_engine",
    ),
    "linear-sizes-divide": Case(
        layers("transformer_engine", device="cuda", hidden=40, heads=4, ffn_hidden=64),
        layers("transformer_engine", device="cuda", hidden=64, heads=4, ffn_hidden=64),
        "found hidden 40, kv_heads x head_dim 20",
        SERVER,
    ),
    "linear-not-here": Case(
        layers("transformer_engine"),
        layers("torch"),
        "Transformer Engine",
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
    "dtype-emulated": Case(
        RunSpec(dtypes=DtypeSpec(compute="bf16"), launch=LaunchSpec(native_dtypes=True)),
        RunSpec(dtypes=DtypeSpec(compute="bf16")),
        "bf16, which this processor emulates: a step takes several times that of fp32",
        replace(LAPTOP, native_bf16=False),
        LAPTOP,
    ),
    "not-enough-memory": Case(
        RunSpec(model=ModelSpec(preset="llama3-8b")),
        RunSpec(model=ModelSpec(preset="160m")),
        "llama3-8b needs at least 119.7 GiB",
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
