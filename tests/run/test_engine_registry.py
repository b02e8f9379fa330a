"""Engines are loaded by name, and each only when it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optional import param

from bench.engines.fsdp2 import gathered_at_once
from bench.engines.optimizer import build_optimizer, optimizers_of
from bench.engines.registry import build_engine, engine_factory
from bench.engines.stock import autocast
from bench.errors import ConfigError, UnsupportedError
from bench.launch.code import RankCode
from bench.spec import DtypeName, EngineSpec, LaunchSpec, MfsdpSettings, ResolvedDtypes, TrainSpec
from bench.spec.engine_table import TABLE
from examples.engines import deepspeed

ROOT = Path(__file__).resolve().parents[2]


STAGES = (
    *("bench.worker.rank", "bench.engines.single", "bench.engines.ddp", "bench.engines.fsdp2"),
    "bench.engines.mfsdp",
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, dict[str, str]]:
    """In a fresh interpreter: our modules and their files after each of STAGES, in this order."""
    code = (
        "import importlib, json, sys\nfound = {}\n"
        f"for stage in {STAGES!r}:\n"
        "    importlib.import_module(stage)\n"
        "    found[stage] = {n: m.__file__ for n, m in sys.modules.items()\n"
        "        if n.startswith(('bench.', 'mfsdp_core')) and getattr(m, '__file__', None)}\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "row", [param(one, {*one.needs} - {"torch"}, id=one.name) for one in TABLE]
)
def test_every_engine_of_the_table_has_a_module_that_builds_it(row):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not ours
        assert callable(engine_factory(row))


def test_a_factory_that_takes_other_arguments_is_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "own_engine.py").write_text("def build(model, device):\n    return model\n")
    monkeypatch.syspath_prepend(tmp_path)
    resolved = SimpleNamespace(engine=EngineSpec(name="own_engine:build"))
    with pytest.raises(ConfigError, match=r"expected own_engine:build\(model, resolved, device\)"):
        build_engine(torch.nn.Linear(1, 1), resolved, torch.device("cpu"))


def test_a_rank_loads_no_engine_before_it_knows_which(loaded):
    engines = {row.factory.partition(":")[0] for row in TABLE}
    assert engines.isdisjoint(loaded["bench.worker.rank"])
    assert "bench.engines.registry" in loaded["bench.worker.rank"]


def test_engines_of_torch_never_load_the_core(loaded):
    assert "bench.engines.ddp" in loaded["bench.engines.fsdp2"]
    assert not [name for name in loaded["bench.engines.fsdp2"] if name.startswith("mfsdp_core")]


# Loaded in a rank, and not part of what is measured: they read the spec, write the files, or say
# what went wrong. `launch` only holds the request to die with the parent.
KEEPERS = (
    "bench.errors",
    "bench.record",
    "bench.redaction",
    "bench.store",
    "bench.verdict",
    "bench.workload",
    "bench.launch",
)


def test_everything_that_a_rank_loads_is_covered_by_the_identity_of_its_code(loaded):
    covered = {str(ROOT / file) for file in RankCode(ROOT, sys.executable).file_hashes("mfsdp")}
    left_out = {
        name
        for name, file in loaded["bench.engines.mfsdp"].items()
        if file not in covered and not name.startswith((*KEEPERS, *STAGES[1:4]))
    }
    assert left_out == set()


def dtypes(compute: DtypeName, main: DtypeName | None) -> ResolvedDtypes:
    return ResolvedDtypes(compute=compute, main_params=main, main_grads="fp32", grad_comm="fp32")


def test_a_dtype_that_autocast_cannot_compute_in_is_refused():
    with pytest.raises(UnsupportedError, match="not in fp64 on fp32 weights"):
        autocast(dtypes("fp64", "fp32"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("layers", "reshard", "most"),
    [
        ([4, 1, 6, 3], True, 9),  # 6 while 3 is prefetched
        ([4, 1, 6, 3], False, 14),
        ([4, 1, 6, 3], 2, 9 + 7),
        ([5], True, 5),
        ([], True, 0),
    ],
)
def test_fsdp2_has_at_most_a_layer_and_the_next_one_gathered(layers, reshard, most):
    assert gathered_at_once(layers, reshard) == most


def test_every_switch_of_a_spec_reaches_the_core_under_its_own_name():
    changed = MfsdpSettings(
        allocator="max_pool",
        pool_slots=3,
        persistent_fallback=True,
        fine_grained_gather=True,
        overlap_param_gather=False,
        overlap_grad_reduce=False,
        nccl_ub=True,
        symmetric_registration=False,
        manual_registration=True,
        average_in_collective=True,
        transport="native",
        nan_check=True,
        cuda_graph=True,
        per_token_loss=True,
        offload=True,
    )
    assert changed.arguments() == {
        "offload": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "average_in_collective": True,
        "transport": "native",
        "nccl_ub": True,
        "report_nan_in_param_grad": True,
        "disable_symmetric_registration": True,
        "manual_registration": True,
        "use_decoupled_grad": False,
        "calculate_per_token_loss": True,
        "cuda_graph_mode": True,
        "fsdp_double_buffer": False,
        "allocator": "max_pool",
        "pool_slots": 3,
        "fsdp_db_use_persist_buf_on_alloc_fail": True,
        "enable_fine_grained_param_gather": True,
    }


def test_adamw_takes_every_hyperparameter_from_the_spec():
    train = TrainSpec(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.7, eps=1e-3)
    (group,) = build_optimizer([torch.nn.Parameter(torch.ones(1))], train).param_groups
    found = (group["lr"], group["weight_decay"], group["betas"], group["eps"])
    assert found == (0.1, 0.5, (0.8, 0.7), 1e-3)


def test_muon_is_refused_where_no_unit_has_a_matrix() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="no unit of the model has one: name unit_classes"):
        optimizers_of(model, model.parameters(), TrainSpec(optimizer="muon"), build_optimizer)


def test_deepspeed_is_refused_where_ranks_share_a_device() -> None:
    shared = SimpleNamespace(launch=LaunchSpec(ranks=2, ranks_per_device=2))
    with pytest.raises(UnsupportedError, match=r"expected launch\.ranks_per_device=1, found 2"):
        deepspeed.build(torch.nn.Linear(1, 1), shared, torch.device("cpu"))  # type: ignore[arg-type]
