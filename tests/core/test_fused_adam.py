"""Transformer Engine's FusedAdam over sharded parameters, by its stand-in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from oracle.fused_adam import FusedAdam
from oracle.ranks import RankPool
from oracle.reference import train
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

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


def trained(strategy: str, decoupled: bool, ranks: int) -> dict[str, torch.Tensor]:
    toy = sharded(strategy, decoupled=decoupled, ranks=ranks)
    optimizer = prepared(toy, use_decoupled_grad=decoupled)
    for cycle in range(3):
        toy.run_cycle(2, cycle)
        optimizer.step()
        # Also before there are gradients, which FusedAdam itself does not survive.
        optimizer.zero_grad(set_to_none=cycle == 0)
        optimizer.zero_grad(set_to_none=False)
    return toy.full_parameters()


def through_a_state_dict(ranks: int, whole: bool) -> bool:
    """A second run that takes over after a step ends where the first one does.

    whole: the state is that of a run on one rank, in plain tensors.
    """
    source = sharded("optim_grads_params", ranks=ranks)
    optimizer = prepared(source, use_decoupled_grad=True)
    source.run_cycle(2, 0)
    optimizer.step()
    optimizer.zero_grad()
    target = sharded("optim_grads_params", ranks=ranks)
    target.model.load_state_dict(source.model.state_dict())
    resumed = prepared(target, use_decoupled_grad=True)
    saved = optimizer.state_dict()
    if whole:
        for states in saved["state"].values():
            states.update({name: full(value) for name, value in states.items()})
    resumed.load_state_dict(saved)
    for toy, one in ((source, optimizer), (target, resumed)):
        toy.run_cycle(2, 1)
        one.step()
    ours, theirs = source.full_parameters(), target.full_parameters()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def full(value: Any) -> torch.Tensor:
    from mfsdp_core import gather_full

    return gather_full(value)


def through_files(folder: Path) -> bool:
    """The same by a sharded checkpoint of torch."""
    import torch.distributed.checkpoint as dcp

    source = sharded("optim_grads_params", ranks=4)
    optimizer = prepared(source, use_decoupled_grad=True)
    source.run_cycle(2, 0)
    optimizer.step()
    optimizer.zero_grad()
    saved = {"model": source.model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = [full(v).clone() for s in saved["optimizer"]["state"].values() for v in s.values()]
    dcp.save(saved, checkpoint_id=folder)
    for states in saved["optimizer"]["state"].values():
        for value in states.values():
            value._local_tensor.zero_()
    dcp.load(saved, checkpoint_id=folder)
    found = [full(v) for s in saved["optimizer"]["state"].values() for v in s.values()]
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def warned_of(main: torch.dtype | None, master_weights: bool) -> list[str]:
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
    elements = sum(p._local_tensor.numel() for p in toy.model.parameters())
    kept = sum(
        s["master_param"]._local_tensor.nbytes for s in optimizer.state.values() if master_weights
    )
    return [str(w.message) for w in found] + [str(kept / max(elements, 1))]


def refusals() -> dict[str, str]:
    found = {}
    for case, attaches, reads in (("read", False, True), ("attached", True, False)):
        toy = sharded("optim", decoupled=attaches)
        with pytest.raises(ConfigurationError) as raised:
            prepared(toy, use_decoupled_grad=reads)
        found[case] = str(raised.value)
    with pytest.raises(ConfigurationError) as raised:
        fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters()))
    found["torch"] = str(raised.value)
    toy = sharded("optim", decoupled=False)
    optimizer = prepared(toy, capturable=True)
    toy.run_cycle(1)
    optimizer.grad_scale = torch.ones(())  # as a GradScaler leaves it
    with pytest.raises(CapabilityNotBuiltError) as refused:
        optimizer.step()
    found["scale"] = str(refused.value)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_training_follows_adamw(ranks: RankPool, strategy: str, decoupled: bool) -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)

    expected, _ = train(NAME, 2, 2, 3, adamw)
    for found in ranks.run(trained, strategy, decoupled, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("world", "whole"), [(2, False), (4, False), (2, True)])
def test_state_is_saved_and_loaded(ranks: RankPool, world: int, whole: bool) -> None:
    """As shards, uneven ones too, and as whole tensors."""
    assert all(ranks.run(through_a_state_dict, world, whole))


def test_a_sharded_checkpoint_knows_where_its_states_lie(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(through_files, tmp_path / "saved"))


def test_a_second_copy_of_main_weights_is_warned_about_with_its_bytes(ranks: RankPool) -> None:
    for both, none, halves in zip(
        ranks.run(warned_of, torch.float32, True),
        ranks.run(warned_of, torch.float32, False),
        ranks.run(warned_of, None, True),
        strict=True,
    ):
        assert "second copy" in both[0]
        assert " B on this rank" in both[0]
        assert both[1] == "4.0"
        assert none == ["0.0"]
        assert halves == ["2.0"]  # BF16 main weights, and what they lack to FP32


def test_gradients_and_scales_that_would_not_arrive_are_refused(ranks: RankPool) -> None:
    found = ranks.run(refusals)[0]
    assert "nothing would be trained" in found["read"]
    assert "use_decoupled_grad=True to fully_shard_model" in found["read"]
    assert "attaches them as .decoupled_grad" in found["attached"]
    assert "AdamW reads gradients from .grad" in found["torch"]
    assert "GradScaler" in found["scale"]
