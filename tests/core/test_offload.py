"""Main weights, gradients and the optimizer's state in host memory change no bit of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mfsdp_core
from late.programs import WAYS, Case, from_oracle, outputs_before_a_change
from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.precision.float8_reference import Float8Reference
from oracle.hybrid import PAIRS, hybrid
from oracle.ranks import WORLD
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

CASES = [*((strategy, "") for strategy in STRATEGIES), *PAIRS]
FP32, BF16 = torch.float32, torch.bfloat16
#: Dtype of the model, and its policy.
POLICIES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy]] = {
    "one dtype": (FP32, MixedPrecisionPolicy(main_params_dtype=FP32)),
    "bf16 computes": (BF16, MixedPrecisionPolicy(grad_comm_dtype=BF16)),
    "gradients are cast": (BF16, MixedPrecisionPolicy(None, FP32, BF16)),
}
WAYS_TO_TRAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "pool": {"allocator": "fixed_pool", "overlap_param_gather": False},
    "every pass": {"check_for_nan_in_grad": True},
    "by module": {"enable_fine_grained_param_gather": True, "unused_parameters": "none"},
}


def _sharded(inner: str, outer: str, policy: str, toy: str, **options: Any) -> Sharded:
    dtype, given = POLICIES[policy]
    options["mixed_precision_policy"] = given
    if outer:
        return hybrid(inner, outer, dtype=dtype, name=toy, **options)
    return shard(toy, inner, WORLD, dtype, **options)


def _trained(toy: Sharded, *, adds: bool) -> list[torch.Tensor]:
    """Losses, norms, gradients and weights of three steps. adds: pass by pass, shown each time."""
    model, found = toy.model, []
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(3):
        for microbatch in range(2):
            with model.sync() if microbatch or adds else model.no_sync():
                found.append(torch.tensor(toy.backward(microbatch, step)))
            if adds and not microbatch:
                next(p.grad for p in model.parameters() if p.grad is not None).mul_(0.5)
        found += [clip_grad_norm_(model, 0.05), *toy.full_gradient().values()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return [*found, *toy.full_parameters().values()]


def _bits(inner: str, outer: str, policy: str, way: str, toy: str) -> None:
    options = WAYS_TO_TRAIN[way]
    adds = way == "every pass" and inner.startswith("optim_g") and not outer
    toys = (_sharded(inner, outer, policy, toy, offload=on, **options) for on in (True, False))
    found, expected = (_trained(one, adds=adds) for one in toys)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


@pytest.mark.on_ranks
@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS_TO_TRAIN)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("inner", "outer"), CASES)
def test_no_bit_changes(inner: str, outer: str, policy: str, way: str) -> None:
    _bits(inner, outer, policy, way, "aligned_stack" if outer else "unequal_units")


def _clipped(toy: Sharded, *, last: bool) -> list[torch.Tensor]:
    """Norms that torch clips after every pass, and weights. last: whether all passes are synced."""
    model, found = toy.model, []
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    for microbatch in range(3):
        with model.sync() if last or not microbatch else model.no_sync():
            toy.backward(microbatch)
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        found.append(norm.full_tensor())
    model.finish_grad_sync()
    optimizer.step()
    return [*found, *toy.full_parameters().values()]


@pytest.mark.on_ranks
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inner", STRATEGIES[2:])
def test_what_is_attached_shows_a_pass_that_is_not_the_last(
    inner: str, policy: str, offload: bool
) -> None:
    found = _clipped(_sharded(inner, "", policy, "unequal_units", offload=offload), last=False)
    expected = _clipped(_sharded(inner, "", policy, "unequal_units"), last=True)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


@pytest.mark.on_ranks
@pytest.mark.parametrize(("inner", "outer"), CASES)
def test_bytes_of_the_host_are_booked_apart(inner: str, outer: str) -> None:
    """Between backward pass and step: of gradients and of what is optimized none on the device."""
    on, off = (
        _sharded(inner, outer, "one dtype", "aligned_stack", offload=offload).model
        for offload in (True, False)
    )
    made = []
    for model, gradients in ((on, 0), (off, 1)):
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        made.append(optimizer)
        with model.sync():
            model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert bool(model.ledger.bytes_by_category()["gradients"]) == gradients
    held = sum(p.to_local().nbytes for p in on.parameters())
    host, device = (one.bytes_by_category() for one in (on.ledger.host, on.ledger))
    assert host["main_weights"] >= held
    assert host["optimizer_state"] >= 2 * held
    assert host["gradients"] == host["main_weights"]
    assert device["main_weights"] == device["optimizer_state"] == 0
    made[0].zero_grad()
    assert not on.ledger.host.bytes_by_category()["gradients"]
    assert not any(off.ledger.host.bytes_by_category().values())


@pytest.mark.on_ranks
@pytest.mark.parametrize("saves", [True, False])
def test_checkpoints_load_with_and_without(tmp_path: Path, saves: bool) -> None:
    first = shard("unequal_units", 3, WORLD, offload=saves)
    other = shard("unequal_units", 1, WORLD, offload=not saves)
    optimizers, folder = [], tmp_path / "saved"
    for toy in (first, other):
        made = fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters(), lr=0.05))
        optimizers.append(made)
        toy.run_cycle(1)
        made.step()
        made.zero_grad()
    mfsdp_core.save_checkpoint(folder, first.model, optimizers[0])
    mfsdp_core.load_checkpoint(folder, other.model, optimizers[1])
    for toy, made in zip((first, other), optimizers, strict=True):
        toy.run_cycle(1, 1)
        made.step()
    saved, loaded = first.full_parameters(), other.full_parameters()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"offload": "false"}, "expected True or False"),
        ({"use_decoupled_grad": True}, "use_decoupled_grad"),
        ({"nccl_ub": True}, "nccl_ub"),
        ({"on_double_reduction": "warn"}, "on_double_reduction"),
        ({"cuda_graph_mode": True, "fsdp_double_buffer": True}, "waits for gradients"),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(weight_codec=Float8Reference("block"))},
            "weight_codec",
        ),
    ],
)
def test_what_cannot_be_on_the_host_is_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        shard("linear_stack", 3, WORLD, **{"offload": True} | options)


LATE = [Case(s, toy="unequal_units", options={"offload": True}) for s in STRATEGIES]
HYBRID = [Case(i, o, "aligned_stack", {"offload": True}, clip_norm=0.05) for i, o in PAIRS]
LATE += [
    Case("optim_grads_params", options=WAYS[way] | {"offload": True})
    for way in ("fixed_pool", "temporary", "by_module")
]


@pytest.mark.on_ranks
@pytest.mark.sample
@pytest.mark.parametrize(
    "case",
    [*LATE, HYBRID[-1], *(pytest.param(one, marks=pytest.mark.nightly) for one in HYBRID[:-1])],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_copies_that_are_late_change_nothing(case: Case, seed: int) -> None:
    assert from_oracle(case, seed) <= 1e-12


@pytest.mark.on_ranks
@pytest.mark.parametrize("case", [LATE[0], LATE[3]], ids=str)
def test_weights_that_the_host_writes_behind_a_pass_do_not_reach_it(case: Case) -> None:
    expected = outputs_before_a_change(case, None)
    assert expected.any()
    for seed in range(4):
        assert torch.equal(outputs_before_a_change(case, seed), expected)
