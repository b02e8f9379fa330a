"""The sweeps that come with the project, and those of the documentation: they load and plan."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from sweep_texts import parse_sweep

import sweeps
from bench.cli.main import run_command_line
from bench.plan import Plan
from bench.resolve import Machine
from bench.resolve.machine import described_machine
from sweeps.definition import load_sweep
from sweeps.matrix import expand
from sweeps.planning import make_plan

FOLDER = Path(sweeps.__path__[0])
DOCS = Path(__file__).parents[2] / "docs"
LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ALLOCATORS = ("storage_resize", "temporary", "fixed_pool", "max_pool")


def plan_of(name: str, machine: Machine = LAPTOP) -> Plan:
    return make_plan(load_sweep(FOLDER / f"{name}.yaml"), machine)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_definition_loads_is_named_like_its_file_and_says_what_it_is(path: Path):
    definition = load_sweep(path)
    assert definition.name == path.stem
    assert definition.description


BUFFERLESS = [
    *(f"{how}-{dtype}-ub_off" for how in ("fsdp", "hfsdp") for dtype in ("fp32", "bf16")),
    *(f"fp32_sums_{how}" for how in ("fsdp", "hfsdp")),
]
PAIRS = [("ddp", "no_shard"), ("fsdp2", "optim_grads_params"), *(("mfsdp", s) for s in STRATEGIES)]
BOTH = (False, True)
HYBRID = ("hybrid-tiny", 2)
HFSDP = (2, "optim", 4)
RECIPES = [
    f"{one}-{how}" for one in ("delayed", "current", "block") for how in ("recipe", "compute")
]
NO_CODES = "gather-precision-without-recipe"
DENSE = ("no_shard", "optim_grads_params")

#: Of a sweep the settings that tell its cells apart, the cells by these, and what is pruned.
PROMISED = {
    "quickstart": (
        "engine.name strategy dtypes.compute launch.ranks data.kind",
        {
            *((*PAIRS[n], "fp32", 2, "text") for n in (0, 1, 3, 5)),
            *((*PAIRS[n], "bf16", 2, "text") for n in (1, 5)),
        },
        {},
    ),
    "parity": (
        "engine.name strategy train.steps train.clip_norm dtypes.compute",
        {(*pair, 50, 1.0, "fp32") for pair in (*PAIRS, ("single", "no_shard"))},
        {},
    ),
    "pr5462_allocators_cpu": (
        "engine.allocator engine.pool_slots shape.preset microbatches",
        {*((name, 2, *HYBRID) for name in ALLOCATORS), ("max_pool", 3, *HYBRID)},
        {},
    ),
    "reducers": (
        "engine.transport strategy dtypes.grad_comm dtypes.reduce",
        {
            *(("point_to_point", s, dtype, "fp32") for s in DENSE for dtype in ("fp32", "bf16")),
            *(("native", s, dtype, dtype) for s in DENSE for dtype in ("fp32", "bf16")),
        },
        {},
    ),
    "pr4133_decoupled_cpu": (
        "train.optimizer train.master_weights engine.decoupled_grad"
        " engine.outer_size engine.outer_strategy launch.ranks",
        {
            ("adamw", False, False, *HFSDP),
            *(("precision_aware_adamw", *how, *HFSDP) for how in product(BOTH, BOTH)),
        },
        {"adamw-decoupled_grad=true": "decoupled-gradients-need-a-reader"},
    ),
    "pr3067_nan_check_cpu": (
        "strategy engine.nan_check", {*product(("optim_grads_params", "optim"), BOTH)}, {},
    ),
    "pr3067_optim_fix_cpu": (
        "engine.name strategy launch.ranks",
        {(*e, ranks) for e in (("ddp", "no_shard"), ("mfsdp", "optim")) for ranks in (2, 8)},
        {},
    ),
    "low_precision_cpu": (
        "id",
        {(name,) for name in ("none-recipe", "mxfp8-recipe", *RECIPES)},
        {
            **dict.fromkeys(("none-compute", "mxfp8-compute"), NO_CODES),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISED)
def test_a_sweep_for_cpus_runs_what_its_first_lines_promise(name: str):
    settings, cells, pruned = PROMISED[name]
    plan = plan_of(name)

    def value(cell, setting: str):
        if setting == "id":
            return cell.id
        section, _, key = setting.partition(".")
        found = getattr(cell.resolved, section)
        if section == "engine" and not hasattr(found, key):
            return found.setting(key)
        return getattr(found, key) if key else found

    assert {tuple(value(cell, one) for one in settings.split()) for cell in plan.cells} == cells
    assert len(plan.cells) == plan.runs == len(cells)
    assert {cell.id: cell.rule for cell in plan.pruned} == pruned
    assert not plan.duplicates


@pytest.mark.parametrize(
    ("name", "count", "rules", "among"),
    [
        ("pr3067_dtypes", 15, {"too-few-devices", "linear-not-here"}, ()),
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


def test_pr3067_is_the_published_matrix():
    definition = load_sweep(FOLDER / "pr3067_dtypes.yaml")
    assert definition.matrix.size == 12
    axes = {"sharding", "dtypes.grad_comm", "buffers"}
    assert {axis.name for axis in definition.matrix.axes} == axes


@pytest.mark.parametrize(
    ("name", "only_on_gpus", "runs", "rule"),
    [
        ("pr3067_dtypes", ("fp32_activations", "nan_check"), BUFFERLESS, "nccl-ub-needs-cuda"),
        ("pr4133_decoupled", ("fused",), None, "decoupled-gradients-need-a-reader"),
        ("pr4181_fine_grained", ("mxfp8_te",), None, "recompute-inside-of-a-unit"),
    ],
)
def test_a_twin_for_cpus_has_the_cells_of_its_original(name, only_on_gpus, runs, rule):
    original, twin = plan_of(name), plan_of(f"{name}_cpu")
    ids = {cell.id for cell in original.pruned if not cell.id.endswith("_logged")}
    of_both = {one for one in ids if not one.startswith(only_on_gpus)}
    of_twin = {cell.id for cell in (*twin.cells, *twin.pruned)}
    assert of_both == {one for one in of_twin if not one.startswith("fp32_sums")}
    assert runs in (None, [cell.id for cell in twin.cells])
    assert {cell.rule for cell in twin.pruned} == {rule}


@pytest.mark.parametrize(
    ("name", "device", "gpus", "runnable", "pruned"),
    [
        ("pr3067_dtypes", "H100", 8, 15, set()),
        ("pr3067_short", "H100", 8, 18, set()),
        ("pr3067_nodes", "H100", 8, 2, {"too-few-nodes"}),
        ("pr3067_nodes", "H100", 32, 4, {"too-few-nodes"}),
        ("pr3067_nodes", "H100", 64, 8, set()),
        ("symmetric", "H100", 16, 4, set()),
        ("pr4133_decoupled", "H100", 8, 9, {"decoupled-gradients-need-a-reader"}),
        (
            "pr4181_fine_grained", "H100", 8, 10,
            {"recompute-inside-of-a-unit", "linear-not-here"},
        ),
        ("pr4181_fine_grained", "B200", 8, 14, {"recompute-inside-of-a-unit"}),
        ("pr5462_graphs", "H100", 8, 24, set()),
        (
            "fp8_layers", "B200", 8, 15,
            {"linear-beside-the-engine", "linear-has-no-such-recipe"},
        ),
    ],
)  # fmt: skip
def test_the_matrices_of_the_requests_on_a_machine_that_is_described(
    name: str, device: str, gpus: int, runnable: int, pruned: set[str]
):
    plan = plan_of(name, described_machine(device, gpus))
    assert len(plan.cells) == runnable
    assert {cell.rule for cell in plan.pruned} == pruned


def test_the_table_of_dtypes_has_every_cell_with_the_package_that_its_authors_use():
    text = (FOLDER / "pr3067_dtypes.yaml").read_text()
    of_package = text.replace("{name: mfsdp,", "{name: megatron_fsdp,")
    plan = make_plan(parse_sweep(of_package), described_machine("H100", 8))
    assert (len(plan.cells), plan.pruned) == (15, ())
    assert {run.engine.name for cell in plan.cells for run in cell.runs.values()} == {
        "megatron_fsdp"
    }
    whole = of_package.replace("optim_grads_params}", "optim}").replace(
        "engine.outer_strategy: optim}", "engine.outer_strategy: no_shard}"
    )
    plan = make_plan(parse_sweep(whole), described_machine("H100", 8))
    (reason,) = {cell.reason for cell in plan.pruned}
    assert reason.startswith("megatron-fsdp 0.6.1 encodes weights from main weights under optim_gr")


WALK = (DOCS / "gpu.md").read_text().split("## The table of pull request 3067")[1].split("```")[1]


@pytest.mark.parametrize(
    "command", re.findall(r"^mfsdp-bench (?:plan|run) ([^#\n]+)", WALK, re.MULTILINE)
)
def test_each_command_of_the_walk_plans_cells_to_run_on_the_machine_it_is_for(command, capsys):
    words = [word for word in command.split() if word != "--report"]
    assert run_command_line(["plan", *words, "--device", "H100", "--gpus", "8"]) == 0
    assert re.search(r"cells (\d+), to run \1, pruned 0", capsys.readouterr().out)


PAGES = ("sweep-file.md", "gates.md", "engines.md", "extending.md")
BLOCKS = {
    name: block
    for page in PAGES
    for block, name in re.findall(
        r"^```yaml\n(name: (\w+).*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
}
CELLS = {
    "first": 4,
    "policies": 6,
    "scaling": 6,
    "reference": 5,
    "tuned": 4,
    "short": 1,
    "allocator": 4,
    "nodes": 2,
    "change": 1,
    "engines": 2,
    "compared": 4,
    "mine": 2,
}


@pytest.mark.parametrize("name", CELLS)
def test_an_example_of_the_documentation_loads_and_plans(name: str):
    assert list(BLOCKS) == list(CELLS)
    definition = parse_sweep(BLOCKS[name])
    ids = [cell.id for cell in expand(definition.matrix)]
    assert make_plan(definition, LAPTOP).size == CELLS[name] == len(ids)
    if name == "reference":
        assert "mfsdp-seq_len=64" in ids
        assert ids[-1] == "single"


def test_every_module_and_definition_is_in_the_tables_of_the_readme():
    names = {p.name for p in FOLDER.iterdir() if p.suffix in {".py", ".yaml"}} - {"__init__.py"}
    named = set(re.findall(r"`([\w.]+\.(?:py|yaml))`", (FOLDER / "README.md").read_text()))
    assert names - named == set()
