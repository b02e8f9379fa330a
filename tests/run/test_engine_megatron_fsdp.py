"""The adapter of the package megatron-fsdp: its calls, the package on CPU ranks, and a stand-in.

The package needs CUDA. On CPU ranks it runs with streams that do nothing; user buffers and layers
of Transformer Engine do not. Where it is not installed, the core, which has the same functions,
stands in for it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch

import mfsdp_core
from bench.doctor.checks import package_findings
from bench.engines.megatron_fsdp import MegatronFsdpEngine, refuse_other_release
from bench.engines.optimizer import build_optimizer
from bench.errors import UnsupportedError
from bench.models.build import build_model
from bench.resolve import engine_rules
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve_anywhere
from bench.resolve.rules import broken_rules
from bench.spec import (
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    MegatronFsdpSettings,
    ModelSpec,
    ResolvedDtypes,
    ResolvedRun,
    RunSpec,
    known_engine,
)
from bench.testing.workers import ForkServer
from bench.validate.cases import Case
from bench.validate.session import MODULES, WorkerSettings, verdicts

CPU = torch.device("cpu")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FP32 = ResolvedDtypes(compute="fp32", main_params="fp32", main_grads="fp32", grad_comm="fp32")
BF16 = DtypeSpec(compute="bf16", main_params="fp32", main_grads="fp32", grad_comm="bf16")


def run(strategy: str = "optim_grads_params", **engine: object) -> ResolvedRun:
    wanted = {"name": "megatron_fsdp", "strategy": strategy, **engine}
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug", layers=1),
            engine=EngineSpec.model_validate(wanted),
            dtypes=BF16,
            launch=LaunchSpec(ranks=1 if engine.get("outer_size") is None else 4),
        )
    )


class CalledError(Exception):
    """Raised by `Binding`, with what a function was given."""


class Binding:
    """Binds a call to the package's own signature instead of making it."""

    def __init__(self, package) -> None:
        self.__name__ = package.__name__
        self.MixedPrecisionPolicy = package.MixedPrecisionPolicy
        self._signature = inspect.signature(package.fully_shard_model)

    def fully_shard_model(self, *arguments, **named):
        called = importlib.import_module(f"{self.__name__}.fully_shard")
        configuration = called.DistributedDataParallelConfig()
        raise CalledError(self._signature.bind(*arguments, **named).arguments, configuration)


@pytest.mark.needs("megatron_fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_call_fits_the_package_that_is_installed(world_of_one, strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each optional package that is missing
        import megatron_fsdp as package
    pool = {"nccl_ub": True, "allocator": "max_pool"}
    rest = {"keep_fp8_transpose_cache": True, "symmetric_registration": False}
    resolved = run(strategy, manual_registration=True, **pool, **rest)
    model = build_model(resolved.shape, recompute="none", seed=1, device=CPU)
    with pytest.raises(CalledError) as call:
        MegatronFsdpEngine(model, resolved, CPU, Binding(package))
    given, configuration = call.value.args
    assert given["zero_dp_strategy"] == strategy
    assert given["nccl_ub"]
    assert given["fsdp_double_buffer"]
    assert given["maxpool_double_buffer"]
    assert given["keep_fp8_transpose_cache"]
    assert configuration.fsdp_manual_registration
    assert given["device_mesh"].mesh_dim_names[-1] == given["tp_dim"]
    assert given["disable_symmetric_registration"]
    assert given["mixed_precision_policy"].main_grads_dtype == torch.float32


def test_every_setting_reaches_the_package_under_its_own_name():
    settings, of_caller = MegatronFsdpSettings(double_buffer=True), {"manual_registration"}
    known = inspect.signature(mfsdp_core.fully_shard_model).parameters
    assert set(settings.arguments()) <= set(known)
    for name in set(MegatronFsdpSettings.model_fields) - of_caller:
        other = "max_pool" if name == "allocator" else not getattr(settings, name)
        changed = settings.model_copy(update={name: other}).arguments()
        differing = [k for k, v in settings.arguments().items() if changed[k] != v]
        assert len(differing) == 1, name


ON_CPU = "megatron_fsdp_on_cpu:build"
ALL = STRATEGIES[-1]
HFSDP = {"ranks": 4, "outer": 2, "outer_strategy": "optim"}


@pytest.mark.processes
@pytest.mark.needs("megatron_fsdp")
@pytest.mark.parametrize(
    "case",
    [
        Case(ON_CPU, "no_shard", microbatches=2, policy="fp32"),
        Case(ON_CPU, "optim", ranks=4, outer=2, microbatches=3, policy="bf16"),
        Case(ON_CPU, "optim_grads", policy="bf16_wire", nan_check=True),
        Case(ON_CPU, ALL, model="tied", microbatches=3, policy="bf16", allocator="fixed_pool"),
        Case(ON_CPU, ALL, model="recomputed", policy="fp32", **HFSDP),
        Case(ON_CPU, ALL, microbatches=3, policy="bf16", allocator="max_pool", **HFSDP),
    ],
    ids=lambda case: case.id,
)
def test_the_package_itself_trains_as_plain_torch_does(fork_server: ForkServer, case: Case):
    (verdict,) = verdicts(fork_server, (case,), WorkerSettings(case_seconds=100.0))
    assert {c.check for c in verdict.failures} == {"freed after deletion"}, verdict
    done = {c.check for c in verdict.checks if c.state == "passed"}
    assert {"losses", "gradients", "norm and clipping", "optimizer step"} <= done


def test_averages_in_collectives_want_a_mesh_of_experts():
    reasons = dict(broken_rules(run(average_in_collective=True), Machine.detect()))
    assert "found average_in_collective=True" in reasons["megatron-fsdp-lacks"]


def test_user_buffers_come_from_memory_of_megatron_core(monkeypatch):
    monkeypatch.setattr(engine_rules, "locate", lambda name: None if "megatron" in name else name)
    registered = run(nccl_ub=True, double_buffer=True, allocator="fixed_pool")
    (reason,) = dict(engine_rules.megatron_package(registered, Machine.detect())).values()
    assert "user buffers from megatron.core.nccl_allocator, which is not installed" in reason


def test_sharding_the_optimizer_on_both_axes_needs_sharded_parameters():
    on_two = {"outer_size": 2, "outer_strategy": "optim"}
    reasons = dict(broken_rules(run("optim_grads", **on_two), Machine.detect()))
    assert "optim_grads_params with optim" in reasons["strategy-not-in-engine"]
    assert "strategy-not-in-engine" not in dict(broken_rules(run(**on_two), Machine.detect()))


class Stepping:
    """The core, with the step of zeros that the package takes when it shards an optimizer."""

    __name__ = "mfsdp_core"
    __file__ = mfsdp_core.__file__
    MixedPrecisionPolicy = mfsdp_core.MixedPrecisionPolicy

    @staticmethod
    def fully_shard_model(module, **named):
        # The two switches that the core has under one name of its own, `allocator`.
        for name in ("maxpool_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail"):
            assert not named.pop(name)
        model = mfsdp_core.fully_shard_model(module, **named)
        shards = model.state_dict()
        for name, parameter in model.named_parameters():
            local = shards[name]._local_tensor
            first = [chunk.offsets[0] for chunk in local.__create_chunk_list__()] or [0]
            begin = first[0] * math.prod(parameter.shape[1:])
            parameter.megatron_fsdp_slice = slice(begin, begin + local.numel())
        return model

    @staticmethod
    def fully_shard_optimizer(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return mfsdp_core.fully_shard_optimizer(optimizer)


@pytest.mark.needs("megatron_fsdp")
def test_user_buffers_are_registered_once_after_the_first_step(world_of_one):
    class Named(Stepping):
        __name__ = "megatron_fsdp"

    resolved = run(manual_registration=True)
    model = build_model(resolved.shape, recompute="none", seed=1, device=CPU)
    engine = MegatronFsdpEngine(model, resolved, CPU, Named())
    with pytest.raises(RuntimeError, match=r"manual_buffer_registration\(\) registers NCCL user"):
        engine.optimizer_step()
    engine.optimizer_step()


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.needs("megatron_fsdp")
def test_the_package_itself_passes_validation_on_a_gpu():
    asked = [Case("megatron_fsdp", one, policy="bf16", ranks=1) for one in STRATEGIES]
    with ForkServer(modules=MODULES) as server:
        found = list(verdicts(server, asked, WorkerSettings(device="cuda", case_seconds=100.0)))
    for verdict in found:
        assert verdict.state == "passed", (verdict.case, verdict.failures, verdict.reason)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_around_the_core_it_steps_as_plain_torch_does(world_of_one, strategy, microbatches):
    resolved = run(strategy).model_copy(update={"microbatches": microbatches, "dtypes": FP32})
    model = build_model(resolved.shape, recompute="none", seed=1, device=CPU)
    plain = build_model(resolved.shape, recompute="none", seed=1, device=CPU)
    built = MegatronFsdpEngine(model, resolved, CPU, Stepping())
    optimizer = build_optimizer(plain.parameters(), resolved.train)
    for step in range(2):
        for index in range(microbatches):
            tokens = torch.arange(32).reshape(2, 16) + 7 * index + step
            is_last = index == microbatches - 1
            loss = built.forward_backward(tokens, tokens, 1 / microbatches, is_last)
            expected = plain(tokens, tokens)
            (expected / microbatches).backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        found = built.clip_grad_norm(0.5)
        assert norm > 0.5
        assert found.item() == pytest.approx(norm.item(), rel=1e-5)
        built.optimizer_step()
        built.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    weights = built.inspection().whole_weights()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-5, atol=1e-6), name


def test_a_plan_says_how_to_install_what_is_not_there(monkeypatch):
    engine_rules._why_not_here.cache_clear()
    monkeypatch.setattr(engine_rules, "locate", lambda name: None if "megatron" in name else name)
    reasons = dict(broken_rules(run(), Machine.detect()))
    engine_rules._why_not_here.cache_clear()
    assert reasons["engine-not-here"].endswith(known_engine("megatron_fsdp").install)
    assert "pip install" in reasons["engine-not-on-device"]


@pytest.mark.parametrize("engine", ["megatron_fsdp", "megatron_fsdp_v2"])
@pytest.mark.needs("megatron_fsdp")
def test_another_release_is_refused_by_plan_doctor_and_rank(engine, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"megatron-fsdp": "0.7.0"}.get)
    monkeypatch.setattr("bench.doctor.checks.installed_version", {"megatron-fsdp": "0.7.0"}.get)
    engine_rules._why_not_here.cache_clear()
    words = engine_rules._why_not_here(engine, Path.cwd())
    engine_rules._why_not_here.cache_clear()
    assert words.startswith(f"engine {engine} calls megatron-fsdp 0.6, and other releases may take")
    assert words.endswith(f"found 0.7.0: {known_engine(engine).install}")
    with pytest.raises(UnsupportedError, match=r"found 0\.7\.0"):
        refuse_other_release(engine)
    doctor = {finding.what: finding for finding in package_findings()}["megatron-fsdp"]
    assert (doctor.level, doctor.found) == ("note", "0.7.0")
    assert doctor.remedy == known_engine(engine).install
