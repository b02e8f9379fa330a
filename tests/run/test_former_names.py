"""Records and baselines from before runs were named by what differs from a default."""

from __future__ import annotations

import json

import pytest
from small_runs import small_run

from bench.errors import ConfigError
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ModelSpec, ResolvedRun, RunSpec
from bench.spec.former_name import former_config_hash
from bench.store.upgrade import upgraded_plan, upgraded_spec

#: Names that a quickstart sweep of the version before has given to its folders.
FORMER = {
    ("ddp", "no_shard", "fp32"): "4b9d207b513b",
    ("ddp", "no_shard", "bf16"): "66f1f9c4506b",
    ("fsdp2", "optim_grads_params", "fp32"): "b7ff37cd23b7",
    ("mfsdp", "no_shard", "fp32"): "c4250cd08cab",
    ("mfsdp", "optim_grads_params", "fp32"): "3e3de751d782",
    ("mfsdp", "optim_grads_params", "bf16"): "6171b7942b31",
}
_SWITCHES = {
    "outer_strategy": "no_shard",
    "outer_size": 1,
    "allocator": "storage_resize",
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "nccl_ub": False,
    "double_buffer": False,
    "average_in_collective": False,
    "transport": "auto",
    "decoupled_grad": False,
    "separate_gather_group": False,
    "pool_slots": 2,
}


TRAIN = {"steps": 20, "global_batch": 4, "micro_batch": 2, "seq_len": 64, "warmup_steps": 5}
TRAIN |= {"lr": 3e-4, "clip_norm": 1.0}


def quickstart(engine: str, strategy: str, dtype: str) -> ResolvedRun:
    sent = {"compute": dtype, "grad_comm": dtype}
    return small_run(
        {"name": engine, "strategy": strategy},
        model={"preset": "tiny"},
        data={"kind": "text"},
        train=TRAIN,
        launch={"timeout_seconds": 180.0, "hang_seconds": 60.0},
        dtypes=sent | {"main_params": "fp32", "main_grads": "fp32"},
    )


@pytest.mark.parametrize("run", FORMER)
def test_a_former_record_has_the_name_of_the_same_run_today(run: tuple[str, str, str]) -> None:
    today = quickstart(*run)
    assert former_config_hash(today) == FORMER[run]
    document = json.loads(today.model_dump_json())
    del document["factory"], document["shape"]["rope_scaling"]
    former = {"fine_grained_gather": None} if run[0] != "mfsdp" else {"fine_grained_gather": False}
    document["engine"] = _SWITCHES | document["engine"] | former
    assert ResolvedRun.model_validate(upgraded_spec(document)).config_hash == today.config_hash
    del document["engine"]["fine_grained_gather"]  # older still: no such setting
    assert ResolvedRun.model_validate(upgraded_spec(document)).config_hash == today.config_hash


@pytest.mark.parametrize("engine", ["mfsdp", "collective"])
def test_a_transport_that_is_gone_is_read_and_not_run(engine: str) -> None:
    spec = {"engine": {"name": engine, "transport": "point_to_point"}, "launch": {"ranks": 2}}
    document = resolve_anywhere(RunSpec.model_validate(spec)).model_dump(mode="json")
    document["engine"]["transport"] = spec["engine"]["transport"] = "same_host"
    read = ResolvedRun.model_validate(upgraded_spec(document))
    assert read.engine.setting("transport") == "same_host"
    with pytest.raises(ConfigError, match="same_host is gone"):
        resolve_anywhere(RunSpec.model_validate(spec))


def test_a_former_plan_names_its_runs_as_today() -> None:
    run = resolve_anywhere(RunSpec(model=ModelSpec(preset="tiny"), launch=LaunchSpec(ranks=2)))
    resolved = json.loads(run.model_dump_json())
    cell = {"id": "a", "config_hash": "0" * 12, "resolved": resolved}
    by_arm = {"base": {"config_hash": "0" * 12, "resolved": resolved}}
    damaged = {"id": "b", "config_hash": "1" * 12, "resolved": {"shape": 1}}
    plan = upgraded_plan({"cells": [cell | {"by_arm": by_arm}, damaged, "junk"]})
    assert plan["cells"][0]["config_hash"] == run.config_hash
    assert plan["cells"][0]["by_arm"]["base"]["config_hash"] == run.config_hash
    assert plan["cells"][1:] == [damaged, "junk"]


@pytest.mark.parametrize(
    ("engine", "device", "reduce"),
    [
        ({"name": "mfsdp", "strategy": "optim"}, "cpu", "fp32"),
        ({"name": "mfsdp", "strategy": "no_shard"}, "cpu", "bf16"),
        ({"name": "mfsdp", "strategy": "optim"}, "cuda", "bf16"),
        ({"name": "mfsdp", "strategy": "optim", "transport": "point_to_point"}, "cuda", "fp32"),
        ({"name": "mfsdp", "strategy": "optim", "transport": "native"}, "cpu", "bf16"),
        ({"name": "mfsdp", "strategy": "no_shard", "transport": "same_host"}, "cpu", "fp32"),
        ({"name": "mfsdp", "strategy": "optim", "outer_size": 2}, "cpu", None),
        (
            {"name": "mfsdp", "strategy": "optim", "outer_size": 2, "outer_strategy": "optim"},
            "cpu",
            "fp32",
        ),
        ({"name": "fsdp2", "strategy": "optim_grads_params"}, "cpu", "bf16"),
    ],
)
def test_a_record_that_says_nothing_of_sums_reads_as_what_was(
    engine: dict[str, object], device: str, reduce: str | None
) -> None:
    dtypes = {"compute": "bf16", "main_params": "fp32", "main_grads": "fp32", "grad_comm": "bf16"}
    former = {"engine": engine, "dtypes": dtypes, "launch": {"device": device}}
    assert upgraded_spec(former)["dtypes"] == dtypes | {"reduce": reduce}
    today = former | {"dtypes": dtypes | {"reduce": "fp32"}}
    assert upgraded_spec(today)["dtypes"]["reduce"] == "fp32"
