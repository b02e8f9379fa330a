"""Before the first step every engine holds the same FP32 values, whatever it computes in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.engines.local_tensor import local_tensor
from bench.engines.registry import build_engine
from bench.models.build import build_model
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, ModelSpec, ResolvedRun, RunSpec

CPU = torch.device("cpu")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CASES = [
    ("single", "no_shard"),
    ("ddp", "no_shard"),
    *(("fsdp1", strategy) for strategy in STRATEGIES if strategy != "optim"),
    ("fsdp2", "optim_grads"),
    ("fsdp2", "optim_grads_params"),
    *(("mfsdp", strategy) for strategy in STRATEGIES),
]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, without any network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(engine: str, strategy: str, dtypes: DtypeSpec) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug", layers=1, tie_embeddings=True),
            engine=EngineSpec(name=engine, strategy=strategy),
            dtypes=dtypes,
            launch=LaunchSpec(ranks=1),
        )
    )


def model():
    shape = run("single", "no_shard", DtypeSpec()).shape
    return build_model(shape, recompute="none", seed=1, device=CPU)


def optimized(engine) -> list[torch.Tensor]:
    """What the optimizer will update, by size and then by values, as names differ by engine."""
    optimizer = getattr(engine, "optimizer", None) or engine._optimizer
    found = [p for group in optimizer.param_groups for p in group["params"]]
    return [local_tensor(p.detach()) for p in found]


@pytest.mark.parametrize(("engine", "strategy"), CASES)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_main_weights_start_as_the_fp32_values(world_of_one, engine, strategy, compute):
    dtypes = DtypeSpec(compute=compute, main_params="fp32", main_grads="fp32", grad_comm="fp32")
    built = build_engine(model(), run(engine, strategy, dtypes), CPU)
    expected = [p.detach() for p in model().parameters()]
    found = optimized(built)
    assert len(found) == len(expected)
    for want, have in zip(expected, found, strict=True):
        assert have.dtype == torch.float32
        assert torch.equal(have.reshape(want.shape), want)
    assert any(not torch.equal(want, want.bfloat16().float()) for want in expected)


@pytest.mark.parametrize(("engine", "strategy"), [case for case in CASES if case[0] == "mfsdp"])
def test_without_main_params_the_core_optimizes_the_compute_weights(world_of_one, engine, strategy):
    dtypes = DtypeSpec(compute="bf16", main_params=None)
    built = build_engine(model(), run(engine, strategy, dtypes), CPU)
    for want, have in zip(model().parameters(), optimized(built), strict=True):
        assert have.dtype == torch.bfloat16
        assert torch.equal(have.reshape(want.shape), want.detach().bfloat16())


@pytest.mark.parametrize(("engine", "strategy"), CASES)
def test_the_first_loss_in_fp32_is_that_of_the_plain_model(world_of_one, engine, strategy):
    tokens = torch.arange(32).reshape(2, 16)
    built = build_engine(model(), run(engine, strategy, DtypeSpec()), CPU)
    loss = built.forward_backward(tokens, tokens, 1.0, True)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(model()(tokens, tokens).item(), rel=1e-6)
