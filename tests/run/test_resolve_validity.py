from __future__ import annotations

import math
import re

import pytest
from pydantic import ValidationError
from small_runs import LAPTOP

from bench.errors import ConfigError
from bench.resolve import resolve
from bench.spec import (
    DataSpec,
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    ResolvedDtypes,
    RunSpec,
    TrainSpec,
)


def refusal(spec: RunSpec) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(spec, LAPTOP)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"train": {"global_batch": 10, "micro_batch": 2}},
            "10 sequences cannot be split over 2 data-parallel ranks.*8 or 12$",
        ),
        ({"train": {"global_batch": 1, "micro_batch": 2}}, ": 4$"),
        (
            {"train": {"steps": 10, "warmup_steps": 11}},
            "11 steps is longer than the run of 10",
        ),
        ({"model": {"vocab": 255}, "data": {"kind": "text"}}, "at least 256; found 255"),
        ({"data": {"kind": "markov", "path": "/etc/hosts"}}, "reads no file"),
        ({"engine": {"outer_size": 3}, "launch": {"ranks": 4}}, r"\[1, 2, 4\]$"),
        (
            {"engine": {"tensor_parallel": 3}, "launch": {"ranks": 4}},
            "engine.tensor_parallel: 4 ranks cannot be split into groups",
        ),
        (
            {"engine": {"tensor_parallel": 2, "outer_size": 4}, "launch": {"ranks": 4}},
            "engine.outer_size: 2 ranks cannot be split",
        ),
        (
            {"engine": {"expert_parallel": 4, "outer_size": 2}, "launch": {"ranks": 4}},
            "2 ranks of the inner data-parallel axis cannot",
        ),
        *(
            ({"launch": {"env": {name: "1"}}}, "cannot be set by a run")
            for name in ("LD_PRELOAD", "PATH", "PYTHONPATH", "NCLL_DEBUG", "TORCHELASTIC_X")
        ),
        ({"launch": {"env": {"NCLL_DEBUG": "1"}}}, "did you mean NCCL_"),
        *(
            ({"launch": {"env": {name: "1"}}}, "not a variable name")
            for name in ("", "nccl_debug", "NCCL DEBUG", "NCCL_A=B", "NCCL_\0")
        ),
        *(
            ({"launch": {"env": {"NCCL_DEBUG": value}}}, "line break or a NUL")
            for value in ("a\nb", "a\rb", "a\0b")
        ),
        ({"launch": {"env": {"NCCL_X": "x" * 5000}}}, "5000 characters"),
        *(
            ({"launch": {"env": {name: "4"}}}, remedy)
            for name, remedy in (
                ("OMP_NUM_THREADS", "launch.threads_per_rank"),
                ("CUDA_VISIBLE_DEVICES", "shell"),
                ("MFSDP_BENCH_CHECKOUT", "remove it"),
            )
        ),
    ],
)
def test_what_no_machine_can_run_is_refused_with_what_could_be_meant(
    sections: dict[str, dict[str, object]], says: str
) -> None:
    assert re.search(says, refusal(RunSpec.model_validate(sections)), re.DOTALL)


@pytest.mark.parametrize(
    ("engine", "ranks", "data_parallel", "microbatches", "named"),
    [
        ({"name": "single"}, 1, 1, 4, "single"),  # the whole global batch on its one rank
        ({"tensor_parallel": 2}, 4, 2, 2, "-tp2-"),  # a group shares its data
    ],
)
def test_the_global_batch_is_split_over_data_parallel_ranks(
    engine: dict[str, object], ranks: int, data_parallel: int, microbatches: int, named: str
) -> None:
    train = TrainSpec(global_batch=8, micro_batch=2)
    launch = LaunchSpec(ranks=ranks)
    spec = RunSpec(engine=EngineSpec.model_validate(engine), launch=launch, train=train)
    run = resolve(spec, LAPTOP)
    assert (run.data_parallel, run.microbatches) == (data_parallel, microbatches)
    assert named in run.slug


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["train.lr", "launch.timeout_seconds"])
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, value: float) -> None:
    section, _, field = name.partition(".")
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({section: {field: value}})
    (problem,) = caught.value.errors()
    assert (problem["loc"], problem["type"]) == ((section, field), "finite_number")


FAMILIES = """
NCCL_DEBUG TORCH_LOGS PYTORCH_CUDA_ALLOC_CONF OMP_PROC_BIND MKL_DYNAMIC
CUDA_DEVICE_MAX_CONNECTIONS GLOO_SOCKET_IFNAME MFSDP_ANY
"""


def test_a_run_may_set_the_variables_of_the_known_families() -> None:
    variables = dict.fromkeys(FAMILIES.split(), "1")
    assert resolve(RunSpec(launch=LaunchSpec(env=variables)), LAPTOP).launch.env == variables


def test_a_secret_may_not_be_set_because_it_would_be_stored() -> None:
    message = refusal(RunSpec(launch=LaunchSpec(env={"MFSDP_API_TOKEN": "abc123"})))
    assert "looks like a secret" in message
    assert "abc123" not in message


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        # compute, main_params, main_grads, grad_comm, reduce (fsdp.md section 1.4)
        (("bf16", "fp32", None, None), ("bf16", "fp32", "bf16", "bf16", "bf16")),
        (("bf16", "fp32", "fp32", None), ("bf16", "fp32", "fp32", "fp32", "fp32")),
        (("bf16", "fp32", "fp32", "bf16"), ("bf16", "fp32", "fp32", "bf16", "fp32")),
        (("bf16", "fp32", "fp32", "bf16", "bf16"), ("bf16", "fp32", "fp32", "bf16", "bf16")),
        (("bf16", None, None, None), ("bf16", None, "bf16", "bf16", "bf16")),
        (("fp32", "fp32", None, "bf16"), ("fp32", "fp32", "fp32", "bf16", "fp32")),
        (("fp32", "fp32", "bf16", "fp32"), ("fp32", "fp32", "bf16", "fp32", "fp32")),
    ],
)
def test_open_dtypes_follow_the_policy(asked: tuple, resolved: tuple) -> None:
    names = ("compute", "main_params", "main_grads", "grad_comm", "reduce")
    run = resolve(RunSpec(dtypes=DtypeSpec(**dict(zip(names, asked, strict=False)))), LAPTOP)
    assert run.dtypes == ResolvedDtypes(**dict(zip(names, resolved, strict=True)))


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("ddp", "no_shard"), ("fsdp2", "optim_grads_params"), ("mfsdp", "optim_grads_params")],
)
def test_an_engine_without_a_strategy_gets_its_default(engine: str, strategy: str) -> None:
    assert resolve(RunSpec(engine=EngineSpec(name=engine)), LAPTOP).strategy == strategy


def test_limits_of_time_do_not_change_the_name_of_a_run() -> None:
    short = resolve(RunSpec(launch=LaunchSpec(timeout_seconds=5, hang_seconds=5)), LAPTOP)
    assert short.config_hash == resolve(RunSpec(), LAPTOP).config_hash


def test_every_other_choice_changes_the_name_of_a_run() -> None:
    base = resolve(RunSpec(), LAPTOP).config_hash
    specs = [
        RunSpec(model=ModelSpec(layers=3)),
        RunSpec(data=DataSpec(seed=1)),
        RunSpec(engine=EngineSpec(strategy="optim")),
        RunSpec(dtypes=DtypeSpec(grad_comm="bf16")),
        RunSpec(train=TrainSpec(steps=21)),
        RunSpec(launch=LaunchSpec(env={"NCCL_ALGO": "Ring"})),
    ]
    hashes = {resolve(spec, LAPTOP).config_hash for spec in specs}
    assert len(hashes | {base}) == len(specs) + 1
