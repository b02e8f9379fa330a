"""torchao's optimizers with 8-bit and FP8 moments on shards: as on whole tensors, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.judging import same
from mfsdp_core import (
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
    load_checkpoint,
    save_checkpoint,
)
from oracle.ranks import mesh

pytestmark = [pytest.mark.on_ranks, pytest.mark.needs("torchao")]
SIZE, STEPS = 2, 3


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, kind)(parameters, lr=1e-2)
    return made


def drawn() -> nn.Module:
    """Parts are whole blocks, but for a head that is too small for codes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 256, bias=False), nn.Linear(256, 3)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 256, generator=generator)


def sharded(kind: str) -> tuple[Any, Any]:
    model = fully_shard_model(
        drawn(), device_mesh=mesh(SIZE), dp_shard_dim="dp", fsdp_unit_modules=[nn.Linear]
    )
    return model, fully_shard_optimizer(optimizer_of(kind, model.parameters()))


def train(model: Any, optimizer: Any, steps: range) -> None:
    rank = torch.distributed.get_rank() % SIZE
    for step in steps:
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: Any) -> list[torch.Tensor]:
    return [gather_full(parameter).detach().clone() for parameter in model.parameters()]


def kinds_of_state(model: Any, optimizer: Any) -> dict[str, str]:
    return {
        name: type(optimizer.state[parameter]["exp_avg"]._local_tensor).__name__
        for name, parameter in model.named_parameters()
    }


@torch.compiler.set_stance("force_eager")  # compiling takes seconds per shape
@pytest.mark.parametrize(
    ("kind", "codes"), [("AdamW8bit", "OptimState8bit"), ("AdamWFp8", "OptimStateFp8")]
)
def test_moments_of_codes_step_on_shards(kind: str, codes: str) -> None:
    """As in one process."""
    model, optimizer = sharded(kind)
    plain = drawn()
    reference = optimizer_of(kind, plain.parameters())
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1))
        losses = [plain(batch(step, rank)).square().mean() for rank in range(SIZE)]
        (sum(losses) / SIZE).backward()
        reference.step()
        reference.zero_grad()
    same("weights", weights(model), [parameter.detach() for parameter in plain.parameters()])
    kinds = kinds_of_state(model, optimizer)
    assert kinds["module.0.weight"] == codes, kinds
    assert kinds["module.0.bias"] == "Tensor", kinds
    elements = sum(p.to_local().numel() for p in model.parameters())
    assert model.ledger.peak_bytes_by_category()["optimizer_state"] < 8 * elements


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8"])
def test_what_is_saved_is_plain_and_becomes_codes_again(kind: str, tmp_path: Path) -> None:
    model, optimizer = sharded(kind)
    train(model, optimizer, range(STEPS))
    save_checkpoint(tmp_path / kind, model, optimizer)
    plain = optimizer.state_dict()
    assert {type(v["exp_avg"]._local_tensor) for v in plain["state"].values()} == {torch.Tensor}
    again, by_state_dict, forgetful = sharded(kind), sharded(kind), sharded(kind)
    load_checkpoint(tmp_path / kind, *again)
    for other in by_state_dict, forgetful:
        other[0].load_state_dict(model.state_dict())
    by_state_dict[1].load_state_dict(plain)
    found = []
    for other in (model, optimizer), again, by_state_dict, forgetful:
        train(*other, range(STEPS, STEPS + 1))
        found.append(torch.cat([weight.flatten() for weight in weights(other[0])]))
    *loaded, forgotten = (float((one - found[0]).norm()) for one in found[1:])
    # Coding decoded values again moves them by no more than coding them did.
    assert all(apart < forgotten / 10 for apart in loaded), (loaded, forgotten)
    assert kinds_of_state(*again)["module.0.weight"].startswith("OptimState")
