"""Every allocator computes the same to the last bit, in different memory that stays put."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.events import Event
from oracle.hybrid import hybrid
from oracle.models import TOYS, batch, loss
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

NAME = "unequal_units"
ALLOCATORS = ("temporary", "storage_resize", "fixed_pool", "max_pool")
BF16_COMM = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)


def trained(toy: Sharded, steps: int, microbatches: int = 2) -> list[torch.Tensor]:
    """Losses of all microbatches, then the local parameters after `steps` AdamW steps."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        for j in range(microbatches):
            with toy.model.sync() if j == microbatches - 1 else toy.model.no_sync():
                losses.append(toy.backward(j, step))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(losses), *(p.detach().to_local() for p in toy.model.parameters())]


def different_from_default(strategy: str, policy: Any) -> dict[str, int]:
    """By allocator, how many losses and parameters differ from what the default one computes."""
    arguments = {} if policy is None else {"mixed_precision_policy": policy}
    plain = trained(shard(NAME, strategy, 2, **arguments), 3)
    found = {}
    for allocator, slots in (*((name, 2) for name in ALLOCATORS), ("max_pool", 4)):
        toy = shard(NAME, strategy, 2, allocator=allocator, pool_slots=slots, **arguments)
        pairs = zip(trained(toy, 3), plain, strict=True)
        found[f"{allocator} {slots}"] = sum(not torch.equal(a, b) for a, b in pairs)
    return found


def gradient_errors(name: str, allocator: str) -> list[float]:
    toy = shard(name, "optim_grads_params", 2, torch.float64, allocator=allocator)
    errors = []
    for cycle in range(2):
        toy.run_cycle(2, cycle=cycle)
        expected = expected_gradient(name, 2, 2, torch.float64, cycle)
        errors.append(relative_difference(toy.full_gradient(), expected))
        toy.model.zero_grad_buffer()
    return errors


def pointers(toy: Sharded) -> list[Any]:
    return [pool.data_pointers() for pool in toy.model._context.allocators.pools.values()]


def slots_over_steps(toy: Sharded) -> tuple[bool, list[str], list[Any]]:
    """Whether the addresses of 8 steps are those of the start; pooled roles; weights' addresses.

    The last: for every unit, the set of addresses at which its first bucket has been.
    """
    allocators = toy.model._context.allocators
    start, same = pointers(toy), []
    seen: dict[str, set[int]] = {}
    groups = {g.plan.name: g for u in toy.model._context.units for g in u.groups}
    units = toy.model.pool_plan["units"]
    served = {u["bucket"]: u["placement"] == "pool" for u in units}

    def follow(event: Event) -> None:
        same.append(pointers(toy) == start) if event.operation == "reduce_scatter" else None
        if event.kind == "materialise" and served[event.bucket]:
            data = groups[event.bucket].weights.full.data
            seen.setdefault(event.bucket, set()).add(data.data_ptr())

    toy.model.events.subscribe(follow)
    trained(toy, 8)
    return all(same), sorted(allocators.pools), [len(addresses) for addresses in seen.values()]


def flat_slots(allocator: str) -> tuple[bool, list[str], list[Any]]:
    return slots_over_steps(shard(NAME, 3, 2, allocator=allocator))


def hybrid_slots(allocator: str) -> tuple[bool, list[str], list[Any]]:
    toy = hybrid(
        "optim_grads_params",
        "optim",
        name=NAME,
        dtype=torch.float32,
        mixed_precision_policy=BF16_COMM,
        allocator=allocator,
    )
    return slots_over_steps(toy)


def peaks(allocator: str) -> tuple[int, int]:
    """Highest bytes of compute weights and of communication buffers in a training step."""
    toy = shard(NAME, 3, 2, allocator=allocator, transport="native")
    toy.run_cycle(2)
    held = toy.model.ledger.peak_bytes_by_category()
    return held["compute_weights"], held["communication_buffers"]


def faults_of_building() -> int:
    """Pages that the kernel hands out to a second small model while torch fills what it makes."""
    shard(NAME, 3, 2)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shard(NAME, 3, 2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        torch.use_deterministic_algorithms(was)


def plan_of(allocator: str, policy: Any = None) -> dict[str, Any]:
    arguments = {} if policy is None else {"mixed_precision_policy": policy}
    toy = shard(NAME, 3, 2, allocator=allocator, **arguments)
    toy.run_cycle(1)
    found: dict[str, Any] = toy.model.pool_plan
    return found


@pytest.mark.sample
@pytest.mark.parametrize("policy", [None, BF16_COMM], ids=["fp32", "bf16_comm"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_and_weights_are_equal_to_the_last_bit_under_every_allocator(
    ranks: RankPool, strategy: str, policy: Any
) -> None:
    for different in ranks.run(different_from_default, strategy, policy):
        assert set(different.values()) == {0}


@pytest.mark.sample
@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("allocator", ["temporary", "max_pool"])
def test_gradients_of_unusual_models_are_those_of_the_reference(
    ranks: RankPool, name: str, allocator: str
) -> None:
    for errors in ranks.run(gradient_errors, name, allocator):
        assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("run", [flat_slots, hybrid_slots])
@pytest.mark.parametrize("allocator", ["fixed_pool", "max_pool"])
def test_slots_keep_their_addresses_over_8_steps_with_accumulation(
    ranks: RankPool, allocator: str, run: Any
) -> None:
    outer = ["outer_bucket"] if run is hybrid_slots else []
    for same, roles, addresses in ranks.run(run, allocator):
        assert same
        assert roles == ["compute_weights", "grad_bucket", *outer]
        assert addresses == [1] * len(addresses)


def test_allocators_differ_in_memory(ranks: RankPool) -> None:
    found = {name: ranks.run(peaks, name)[0] for name in ALLOCATORS}
    weights = {name: held[0] for name, held in found.items()}
    # Saved weights are kept from the forward to the backward pass.
    assert weights["temporary"] > weights["max_pool"] > weights["storage_resize"]
    assert weights["fixed_pool"] != weights["max_pool"]


def test_gradient_pools_are_planned_in_the_dtype_of_the_wire(ranks: RankPool) -> None:
    plan = ranks.run(plan_of, "max_pool", BF16_COMM)[0]
    dtypes = {pool["role"]: {area["dtype"] for area in pool["areas"]} for pool in plan["pools"]}
    assert dtypes == {"compute_weights": {"float32"}, "grad_bucket": {"bfloat16"}}


def out_of_order() -> str:
    """Error of a model whose units all stay open, since the last registered one runs first."""
    toy = shard("linear_stack", 2, 2, allocator="max_pool")
    model = toy.model
    blocks = model.module.blocks
    order = [blocks[2], blocks[0], blocks[1]]
    model.module.forward = lambda x: model.module.head(order[2](order[1](order[0](x))))
    try:
        loss(model(batch("linear_stack", 0, 0, torch.float32))).backward()
    except PoolExhaustedError as error:
        return str(error)
    return ""


def test_a_gradient_pool_of_open_buckets_is_exhausted_with_their_names(ranks: RankPool) -> None:
    for message in ranks.run(out_of_order):
        assert "grad_bucket pool of 2 slots: bucket blocks.2/" in message
        assert "slot 0: unit blocks.0, slot 1: unit blocks.1; idle slots: none" in message


def with_prefetch(arguments: dict[str, Any]) -> tuple[bool, int]:
    """Whether training is bit-equal to the default's, and the most units resident at once."""
    plain = trained(shard(NAME, 3, 2), 2)
    toy = shard(NAME, 3, 2, **arguments)
    held: set[str] = set()
    most = 0

    def follow(event: Event) -> None:
        nonlocal most
        unit = event.bucket.rpartition("/")[0]
        if event.kind == "materialise":
            held.add(unit)
        elif event.kind == "release":
            held.discard(unit)
        most = max(most, len(held))

    toy.model.events.subscribe(follow)
    found = trained(toy, 2)
    return all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), most


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ({"prefetch_order": "static"}, 2),
        # Not the order in which they run: weights arrive too late or stay too long, but are right.
        ({"prefetch_order": [f"blocks.{p}" for p in (1, 0, 3, 2, 5, 4)]}, 6),
        ({"prefetch_budget_bytes": 0}, 2),
        ({"prefetch_budget_bytes": 1 << 20}, 6),
        ({"prefetch_budget_bytes": 1 << 20, "allocator": "max_pool", "pool_slots": 3}, 3),
        ({"prefetch_budget_bytes": 1 << 20, "allocator": "max_pool"}, 2),
    ],
)
def test_order_and_budget_of_prefetching_change_memory_and_no_bit(
    ranks: RankPool, arguments: dict[str, Any], most: int
) -> None:
    for equal, found in ranks.run(with_prefetch, arguments):
        assert equal
        assert found <= most


def test_building_touches_no_memory_that_it_does_not_use(ranks: RankPool) -> None:
    pages_of_32_mb = 8192
    assert max(ranks.run(faults_of_building)) < pages_of_32_mb / 2
