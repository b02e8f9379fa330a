"""torchao's FP8 layers against torch's `fully_shard`; its optimizers against one process."""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mfsdp_core
from conformance.judging import same

pytestmark = [
    pytest.mark.processes,
    pytest.mark.nightly,
    pytest.mark.on_ranks(2),
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
]

_WIDTH, _STEPS = 256, 2


def _of_torchao(module: str) -> Any:
    with warnings.catch_warnings():  # about libraries of CUDA that it did not find
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _drawn(*, converted: bool) -> nn.Module:
    """Converted, with a bias for gloo, which sends no FP8 alone; else parts are whole blocks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(_WIDTH, 64), nn.Tanh(), nn.Linear(64, _WIDTH, bias=converted))
    if converted:
        float8 = _of_torchao("torchao.float8")
        config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        model = float8.convert_to_float8_training(model, config=config)
    return model


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, _WIDTH, generator=generator)


def _sharded(module: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return mfsdp_core.fully_shard_model(
        module, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[nn.Linear]
    )


def _losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(_STEPS):
        loss = model(_batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_codes_are_gathered_by_hooks() -> None:
    """Losses are those of `fully_shard`, and a byte per weight travels."""
    model = _sharded(_drawn(converted=True))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = _losses(model, mfsdp_core.fully_shard_optimizer(adam))
    plain = _drawn(converted=True)
    for layer in plain.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    fully_shard(plain)
    same("losses", found, _losses(plain, torch.optim.Adam(plain.parameters(), lr=1e-2)))
    gathered = model.wire_log.gathered_bytes
    assert gathered["uint8"] > 0.9 * sum(gathered.values()), f"gathered {dict(gathered)}"


def test_moments_of_codes_step_as_on_whole_weights() -> None:
    """8-bit and FP8 moments: the weights of one process."""
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds per shape
        _step_on_codes()


def _step_on_codes() -> None:
    ranks = dist.get_world_size()
    for kind in ("AdamW8bit", "AdamWFp8"):
        make = getattr(_of_torchao("torchao.optim"), kind)
        model, plain = _sharded(_drawn(converted=False)), _drawn(converted=False)
        _losses(model, mfsdp_core.fully_shard_optimizer(make(model.parameters(), lr=1e-2)))
        optimizer = make(plain.parameters(), lr=1e-2)
        for step in range(_STEPS):
            losses = [plain(_batch(step, rank)).square().mean() for rank in range(ranks)]
            (torch.stack(losses).sum() / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = {f"module.{name}": value for name, value in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            whole = mfsdp_core.gather_full(parameter.detach())
            same(f"{kind}, {name}", whole, wanted[name].detach())
