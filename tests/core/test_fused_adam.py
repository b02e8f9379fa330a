"""Transformer Engine's FusedAdam over sharded parameters, by its stand-in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from oracle.cycles import gathered
from oracle.fused_adam import FusedAdam
from oracle.reference import train
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.on_ranks

NAME = "conv_linear"
LR, DECAY = 0.05, 0.1


def sharded(strategy: str, *, decoupled: bool = True, ranks: int = 2) -> Sharded:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    return shard(
        NAME,
        strategy,
        ranks,
        torch.float32,
        mixed_precision_policy=policy,
        use_decoupled_grad=decoupled,
    )


def prepared(toy: Sharded, **options: Any) -> Any:
    optimizer = FusedAdam(toy.model.parameters(), lr=LR, weight_decay=DECAY, **options)
    return fully_shard_optimizer(optimizer)


@pytest.mark.parametrize(
    ("strategy", "decoupled"), [*zip(STRATEGIES, (False, True, True, False), strict=True)]
)
def test_training_follows_adamw(strategy: str, decoupled: bool) -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)

    toy = sharded(strategy, decoupled=decoupled)
    optimizer = prepared(toy, use_decoupled_grad=decoupled)
    for cycle in range(3):
        toy.run_cycle(2, cycle)
        optimizer.step()
        # Also before there are gradients, which FusedAdam itself does not survive.
        optimizer.zero_grad(set_to_none=cycle == 0)
        optimizer.zero_grad(set_to_none=False)
    found = toy.full_parameters()
    for name, value in train(NAME, 2, 2, 3, adamw)[0].items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-3, atol=1e-4)


def after_a_step(ranks: int) -> tuple[Sharded, Any]:
    toy = sharded("optim_grads_params", ranks=ranks)
    optimizer = prepared(toy, use_decoupled_grad=True)
    toy.run_cycle(2, 0)
    optimizer.step()
    optimizer.zero_grad()
    return toy, optimizer


@pytest.mark.parametrize(("world", "whole"), [(2, False), (4, False), (2, True)])
def test_state_is_saved_and_loaded(world: int, whole: bool) -> None:
    """A second run that takes over after a step ends where the first one does.

    As shards, uneven ones too, and (whole) as plain tensors of a run on one rank.
    """
    source, optimizer = after_a_step(world)
    target = sharded("optim_grads_params", ranks=world)
    target.model.load_state_dict(source.model.state_dict())
    resumed = prepared(target, use_decoupled_grad=True)
    saved = optimizer.state_dict()
    if whole:
        for states in saved["state"].values():
            states.update(gathered(states))
    resumed.load_state_dict(saved)
    for toy, one in ((source, optimizer), (target, resumed)):
        toy.run_cycle(2, 1)
        one.step()
    same("weights", target.full_parameters(), source.full_parameters())


def test_a_sharded_checkpoint_knows_where_its_states_lie(tmp_path: Path) -> None:
    source, optimizer = after_a_step(4)
    saved = {"model": source.model.state_dict(), "optimizer": optimizer.state_dict()}
    states = saved["optimizer"]["state"]
    wanted = {n: {k: v.clone() for k, v in gathered(one).items()} for n, one in states.items()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    for one in states.values():
        for value in one.values():
            value._local_tensor.zero_()
    dcp.load(saved, checkpoint_id=tmp_path / "saved")
    same("states", {number: gathered(one) for number, one in states.items()}, wanted)


@pytest.mark.parametrize(
    ("main", "master_weights", "bytes_each"),
    # BF16 main weights, and what they lack to FP32, in the last one.
    [(torch.float32, True, 4), (torch.float32, False, 0), (None, True, 2)],
)
def test_a_second_copy_of_main_weights_is_warned_about_with_its_bytes(
    main: torch.dtype | None, master_weights: bool, bytes_each: int
) -> None:
    toy = shard(
        NAME,
        "optim_grads_params",
        2,
        torch.bfloat16,
        mixed_precision_policy=MixedPrecisionPolicy(main, torch.float32),
        use_decoupled_grad=True,
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = prepared(
            toy,
            use_decoupled_grad=True,
            master_weights=master_weights,
            store_param_remainders=master_weights,
        )
    toy.run_cycle(1)
    optimizer.step()
    said = [str(warning.message) for warning in found]
    assert len(said) == (bytes_each == 4), said
    assert all("second copy" in one and " B on this rank" in one for one in said), said
    elements = sum(p._local_tensor.numel() for p in toy.model.parameters())
    kept = sum(
        s["master_param"]._local_tensor.nbytes for s in optimizer.state.values() if master_weights
    )
    assert kept == bytes_each * elements


def test_gradients_and_scales_that_would_not_arrive_are_refused() -> None:
    toy = sharded("optim", decoupled=False)
    with pytest.raises(ConfigurationError, match="nothing would be trained") as raised:
        prepared(toy, use_decoupled_grad=True)
    assert "use_decoupled_grad=True to fully_shard_model" in str(raised.value)
    toy = sharded("optim", decoupled=True)
    with pytest.raises(ConfigurationError, match=r"attaches them as \.decoupled_grad"):
        prepared(toy, use_decoupled_grad=False)
    with pytest.raises(ConfigurationError, match=r"AdamW reads gradients from \.grad"):
        fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters()))
    toy = sharded("optim", decoupled=False)
    optimizer = prepared(toy, capturable=True)
    toy.run_cycle(1)
    optimizer.grad_scale = torch.ones(())  # as a GradScaler leaves it
    with pytest.raises(CapabilityNotBuiltError, match="GradScaler"):
        optimizer.step()
