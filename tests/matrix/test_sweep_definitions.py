"""The sweeps that come with the project: they load, and plan as their first lines promise."""

from __future__ import annotations

from pathlib import Path

import pytest

import sweeps
from bench.resolve import Machine, resolve
from bench.resolve.cuda_devices import CudaDevice
from bench.resolve.described import described_machine
from bench.resolve.state_bytes import state_bytes_by_category
from bench.spec import RunSpec
from sweeps.definition import load_sweep
from sweeps.plan import Plan
from sweeps.planning import make_plan

FOLDER = Path(sweeps.__path__[0])
LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
STRATEGIES = {"no_shard", "optim", "optim_grads", "optim_grads_params"}


def plan_of(name: str) -> Plan:
    return make_plan(load_sweep(FOLDER / f"{name}.yaml"), LAPTOP)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_definition_loads_is_named_like_its_file_and_says_what_it_is(path: Path):
    definition = load_sweep(path)
    assert definition.name == path.stem
    assert definition.description


def test_quickstart_runs_every_engine_and_strategy_in_two_policies_on_two_cpu_ranks():
    plan = plan_of("quickstart")
    assert not plan.pruned
    assert not plan.duplicates
    runs = {
        (c.resolved.engine.name, c.resolved.strategy, c.resolved.dtypes.compute) for c in plan.cells
    }
    expected = {("mfsdp", strategy) for strategy in STRATEGIES}
    expected |= {("ddp", "no_shard"), ("fsdp2", "optim_grads_params")}
    assert runs == {(*pair, dtype) for pair in expected for dtype in ("fp32", "bf16")}
    assert {c.resolved.launch.ranks for c in plan.cells} == {2}
    assert {c.resolved.data.kind for c in plan.cells} == {"text"}
    assert plan.runs == 12
    low = [c.resolved.dtypes for c in plan.cells if c.labels["policy"] == "bf16"]
    assert {(d.compute, d.main_params, d.main_grads, d.grad_comm) for d in low} == {
        ("bf16", "fp32", "fp32", "bf16")
    }


def test_parity_holds_everything_equal_but_engine_and_strategy():
    plan = plan_of("parity")
    assert {(c.resolved.engine.name, c.resolved.strategy) for c in plan.cells} == {
        ("single", "no_shard"),
        ("ddp", "no_shard"),
        ("fsdp2", "optim_grads_params"),
        *(("mfsdp", strategy) for strategy in STRATEGIES),
    }
    (train,) = {c.resolved.train.model_dump_json() for c in plan.cells}
    assert '"steps":50' in train
    assert '"clip_norm":1.0' in train
    assert len({c.resolved.dtypes for c in plan.cells}) == 1


ALLOCATORS = ("storage_resize", "temporary", "fixed_pool", "max_pool")
NEEDS_8 = "needs 8 CUDA devices; this machine shows 0"


@pytest.mark.parametrize(
    ("name", "count", "rules", "among"),
    [
        ("pr3067_dtypes", 10, {"too-few-devices", "linear-not-here"}, ()),
        (
            "pr5462_allocators", 7, {"too-few-devices"},
            (*ALLOCATORS, "max_pool_3", "fixed_pool_ub", "max_pool_ub"),
        ),
        (
            "nccl_offload", 14, {"too-few-devices"},
            [f"{name}-{log}" for name in ("copy_engine", "nvls") for log in ("timed", "logged")],
        ),
        (
            "gpu_one", None, {"too-few-devices", "engine-not-here"},
            [
                f"{size}-{engine}"
                for size in ("1b", "3b")
                for engine in ("single", "ddp", "fsdp2", "mfsdp", "mfsdp_graph")
            ],
        ),
        ("communication_published", 7, None, ()),
    ],
)  # fmt: skip
def test_a_sweep_for_gpus_is_planned_here_and_says_of_every_cell_what_this_machine_lacks(
    name, count, rules, among
):
    plan = plan_of(name)
    assert not plan.cells
    assert all(cell.reason for cell in plan.pruned)
    assert count in (None, len(plan.pruned))
    assert rules is None or {cell.rule for cell in plan.pruned} <= rules
    assert {*among} <= {cell.id for cell in plan.pruned}
    if name == "pr5462_allocators":
        assert {cell.reason for cell in plan.pruned} == {NEEDS_8}


def test_pr3067_is_the_published_matrix_and_published_points_are_targets():
    definition = load_sweep(FOLDER / "pr3067_dtypes.yaml")
    assert definition.matrix.size == 8
    axes = {"sharding", "dtypes.grad_comm", "buffers"}
    assert {axis.name for axis in definition.matrix.axes} == axes
    assert len(load_sweep(FOLDER / "communication_published.yaml").targets) == 7


@pytest.mark.parametrize(
    ("name", "only_on_gpus"),
    [
        ("pr3067_dtypes", ("fp32_activations", "nan_check")),
        ("pr4133_decoupled", ("fused",)),
        ("pr4181_fine_grained", ("mxfp8_te",)),
    ],
)
def test_a_twin_for_cpus_has_the_cells_of_its_original(name: str, only_on_gpus: tuple[str, ...]):
    original, twin = plan_of(name), plan_of(f"{name}_cpu")
    of_both = {cell.id for cell in original.pruned if not cell.id.startswith(only_on_gpus)}
    assert of_both == {cell.id for cell in (*twin.cells, *twin.pruned)}


def test_the_cpu_twin_of_pr3067_runs_what_needs_no_registered_buffers():
    twin = plan_of("pr3067_dtypes_cpu")
    assert [c.id for c in twin.cells] == [
        "fsdp-fp32-ub_off",
        "fsdp-bf16-ub_off",
        "hfsdp-fp32-ub_off",
        "hfsdp-bf16-ub_off",
    ]
    assert {c.rule for c in twin.pruned} == {"nccl-ub-needs-cuda"}


def test_the_cpu_twin_of_pr5462_runs_every_allocator_on_a_hybrid_of_three_unit_sizes():
    plan = plan_of("pr5462_allocators_cpu")
    assert not plan.pruned
    assert {c.resolved.engine.setting("allocator") for c in plan.cells} == {*ALLOCATORS}
    assert {c.resolved.shape.preset for c in plan.cells} == {"hybrid-tiny"}
    assert {c.resolved.microbatches for c in plan.cells} == {2}
    assert sorted(c.resolved.engine.setting("pool_slots") for c in plan.cells) == [2, 2, 2, 2, 3]


def test_reducers_differ_in_transport_alone_within_each_strategy_and_dtype():
    plan = plan_of("reducers")
    assert not plan.pruned
    cells = {(c.resolved.strategy, c.resolved.dtypes.grad_comm) for c in plan.cells}
    assert cells == {(s, d) for s in ("no_shard", "optim_grads_params") for d in ("fp32", "bf16")}
    assert {c.resolved.engine.setting("transport") for c in plan.cells} == {
        "native",
        "point_to_point",
    }
    sums = {c.id: c.resolved.dtypes.reduce for c in plan.cells}
    assert {cell for cell, dtype in sums.items() if dtype == "bf16"} == {
        cell for cell in sums if "bf16" in cell and "native" in cell
    }
    assert plan.runs == 8


def test_the_pr4133_twin_prunes_decoupled_gradients_that_nobody_reads():
    plan = plan_of("pr4133_decoupled_cpu")
    assert [(c.id, c.rule) for c in plan.pruned] == [
        ("adamw-decoupled_grad=true", "decoupled-gradients-need-a-reader")
    ]
    runs = [c.resolved for c in plan.cells]
    assert {(r.engine.outer_size, r.engine.outer_strategy, r.launch.ranks) for r in runs} == {
        (2, "optim", 4)
    }
    assert {
        (r.train.optimizer, r.train.master_weights, r.engine.setting("decoupled_grad"))
        for r in runs
    } == {
        ("adamw", False, False),
        *(
            ("precision_aware_adamw", master, decoupled)
            for master in (False, True)
            for decoupled in (False, True)
        ),
    }


def test_master_weights_of_the_optimizer_cost_the_twin_four_bytes_per_parameter_and_shard():
    cells = {c.id: c.resolved for c in plan_of("pr4133_decoupled_cpu").cells}
    plain, wasteful = (
        state_bytes_by_category(cells[f"{label}-decoupled_grad=true"])["optimizer_state"]
        for label in ("aware", "aware_master")
    )
    run = cells["aware-decoupled_grad=true"]
    assert wasteful - plain == pytest.approx(4 * run.shape.parameters / 4, rel=0.01)


def test_every_recipe_gathers_as_codes_and_as_bf16_unless_a_reason_is_given():
    plan = plan_of("low_precision_cpu")
    assert {c.id for c in plan.cells} == {
        "none-recipe",
        "mxfp8-recipe",
        *(f"{r}-{g}" for r in ("delayed", "current", "block") for g in ("recipe", "compute")),
    }
    assert {c.id: c.rule for c in plan.pruned} == {
        "none-compute": "gather-precision-without-recipe",
        "mxfp8-compute": "gather-precision-without-recipe",
        "nvfp4-recipe": "recipe-not-built",
        "nvfp4-compute": "recipe-not-built",
    }


def test_the_twin_of_pr4181_runs_its_matrix_but_for_what_needs_gathers_by_module():
    original, twin = plan_of("pr4181_fine_grained"), plan_of("pr4181_fine_grained_cpu")
    of_both = {c.id: c.rule for c in original.pruned if not c.id.startswith("mxfp8_te")}
    cells = [f"mxfp8-{how}-fine_grained_gather=false" for how in ("full", "selective")]
    assert {c.id: c.rule for c in twin.pruned} == dict.fromkeys(cells, "recompute-inside-of-a-unit")
    assert {of_both.pop(cell) for cell in cells} == {"recompute-inside-of-a-unit"}
    assert set(of_both.values()) == {"too-few-devices"}


@pytest.mark.parametrize(
    ("name", "device", "gpus", "runnable", "pruned"),
    [
        ("pr3067_dtypes", "H100", 8, 10, set()),
        ("pr3067_short", "H100", 8, 12, set()),
        ("pr3067_nodes", "H100", 8, 1, {"too-few-nodes"}),
        ("pr3067_nodes", "H100", 32, 2, {"too-few-nodes"}),
        ("pr3067_nodes", "H100", 64, 4, set()),
        ("symmetric", "H100", 16, 4, set()),
        ("pr4133_decoupled", "H100", 8, 9, {"decoupled-gradients-need-a-reader"}),
        (
            "pr4181_fine_grained", "H100", 8, 10,
            {"recompute-inside-of-a-unit", "linear-not-here"},
        ),
        ("pr4181_fine_grained", "B200", 8, 14, {"recompute-inside-of-a-unit"}),
        ("pr5462_graphs", "H100", 8, 24, set()),
        (
            "fp8_layers", "B200", 8, 19,
            {"linear-beside-the-engine", "linear-has-no-such-recipe", "recipe-not-built"},
        ),
    ],
)  # fmt: skip
def test_the_matrices_of_the_requests_on_a_machine_that_is_described(
    name: str, device: str, gpus: int, runnable: int, pruned: set[str]
):
    plan = make_plan(load_sweep(FOLDER / f"{name}.yaml"), described_machine(device, gpus))
    assert len(plan.cells) == runnable
    assert {cell.rule for cell in plan.pruned} == pruned


def test_the_nan_check_stands_against_cells_without_it():
    plan = plan_of("pr3067_nan_check_cpu")
    assert not plan.pruned
    assert {(c.resolved.strategy, c.resolved.engine.setting("nan_check")) for c in plan.cells} == {
        (strategy, on) for strategy in ("optim_grads_params", "optim") for on in (False, True)
    }


def test_the_optim_fix_sweep_holds_optim_against_ddp_under_two_optimizers():
    plan = plan_of("pr3067_optim_fix_cpu")
    assert not plan.pruned
    assert {
        (c.resolved.engine.name, c.resolved.strategy, c.resolved.train.optimizer)
        for c in plan.cells
    } == {
        (*engine, optimizer)
        for engine in (("ddp", "no_shard"), ("mfsdp", "optim"))
        for optimizer in ("adamw", "sgd")
    }


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2", "mfsdp"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recompute_is_an_axis_of_every_engine(engine: str, recompute: str):
    ranks = 1 if engine == "single" else 2
    spec = RunSpec.model_validate(
        {
            "model": {"preset": "debug", "recompute": recompute},
            "engine": {"name": engine},
            "launch": {"ranks": ranks},
        }
    )
    run = resolve(spec, LAPTOP)
    assert run.recompute == recompute


def test_communication_runs_everything_on_eight_gpus_that_can_run_there():
    device = CudaDevice("NVIDIA H100 80GB HBM3", capability=(9, 0))
    server = Machine(cpu_count=64, memory_bytes=2**40, cuda_devices=(device,) * 8)
    plan = make_plan(load_sweep(FOLDER / "communication.yaml"), server)
    assert {cell.rule for cell in plan.pruned} == {"copy-engine-only-gathers"}
    asked = [
        (c.resolved.collective.operation, c.labels["memory"], c.resolved.measure.nccl)
        for c in plan.cells
    ]
    everywhere = {"plain", "registered", "symmetric"}
    assert {memory for name, memory, _ in asked if name == "all_gather"} == {
        *everywhere,
        "copy_engine",
    }
    assert {memory for name, memory, _ in asked if name == "broadcast"} == everywhere
    assert sum(log == "evidence" for *_, log in asked) * 2 == len(asked)


def test_its_twin_on_a_cpu_prunes_what_needs_nccl_and_runs_every_transport():
    plan = plan_of("communication_cpu")
    assert {cell.rule for cell in plan.pruned} == {
        "registration-needs-nccl",
        "transport-has-no-broadcast",
    }
    runs = {(c.resolved.collective.operation, c.resolved.collective.transport) for c in plan.cells}
    assert len(runs) == 3 * 2 + 1
