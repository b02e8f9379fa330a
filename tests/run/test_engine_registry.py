"""Engines are loaded by name, and each only when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from bench.engines.dtypes import TORCH_DTYPES, main_dtype
from bench.engines.optimizer import build_optimizer
from bench.engines.registry import _MODULES
from bench.engines.stock import autocast
from bench.errors import UnsupportedError
from bench.spec import DtypeName, EngineName, ResolvedDtypes, TrainSpec

ROOT = Path(__file__).resolve().parents[2]


def loaded_after(statement: str, module: str) -> bool:
    code = f"import sys; {statement}; sys.exit(10 if {module!r} in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode in (0, 10)
    return done.returncode == 10


def test_every_engine_of_a_spec_has_a_module_that_builds_it():
    assert set(_MODULES) == set(get_args(EngineName))
    for module in _MODULES.values():
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()


def test_a_rank_loads_no_engine_before_it_knows_which():
    assert not loaded_after("import bench.worker.rank", "mfsdp_core.api")
    assert not loaded_after("import bench.worker.rank", "bench.engines.ddp")


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2"])
def test_engines_of_torch_never_load_the_core(engine):
    assert not loaded_after(f"import bench.engines.{engine}", "mfsdp_core")


def test_every_dtype_of_a_spec_has_a_torch_dtype():
    assert set(TORCH_DTYPES) == set(get_args(DtypeName))


def dtypes(compute: DtypeName, main: DtypeName | None) -> ResolvedDtypes:
    return ResolvedDtypes(compute=compute, main_params=main, main_grads="fp32", grad_comm="fp32")


def test_without_main_params_the_compute_weights_are_the_main_ones():
    assert main_dtype(dtypes("bf16", None)) == torch.bfloat16
    assert main_dtype(dtypes("bf16", "fp32")) == torch.float32


def test_autocast_is_used_only_where_compute_and_main_dtype_differ():
    cpu = torch.device("cpu")
    with autocast(dtypes("fp32", "fp32"), cpu):
        assert not torch.is_autocast_enabled("cpu")
    with autocast(dtypes("bf16", "fp32"), cpu):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")


def test_a_dtype_that_autocast_cannot_compute_in_is_refused():
    with pytest.raises(UnsupportedError, match="not in fp64 on fp32 weights"):
        autocast(dtypes("fp64", "fp32"), torch.device("cpu"))


def test_adamw_decays_weights_by_lr_times_decay_apart_from_the_gradient():
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    weight.grad = torch.zeros(3)
    train = TrainSpec(lr=0.1, weight_decay=0.5)
    build_optimizer([weight], train).step()
    assert torch.allclose(weight.detach(), torch.full((3,), 2.0 * (1 - 0.1 * 0.5)))


def test_adamw_takes_every_hyperparameter_from_the_spec():
    train = TrainSpec(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.7, eps=1e-3)
    (group,) = build_optimizer([torch.nn.Parameter(torch.ones(1))], train).param_groups
    found = (group["lr"], group["weight_decay"], group["betas"], group["eps"])
    assert found == (0.1, 0.5, (0.8, 0.7), 1e-3)


def test_sgd_is_plain():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    optimizer = build_optimizer([weight], TrainSpec(optimizer="sgd", lr=0.1, weight_decay=0))
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((2,), 0.7))
