"""FP8 weights: ranks compute with what one process makes of the whole tensor, to the bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from bench.testing.quantised import quantised
from mfsdp_core import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.memory_model import PolicyNames, memory_at_rest
from mfsdp_core.plan.recipes import Recipe
from mfsdp_core.plan.strategy import parse_strategy
from mfsdp_core.precision.float8_reference import Float8Reference
from oracle.facts import facts_of
from oracle.ranks import WORLD, RankPool, mesh
from oracle.seen_weights import weights_seen
from oracle.sharded import Sharded, shard

RECIPES: tuple[Recipe, ...] = ("delayed", "current", "block", "mxfp8")
B16, F32 = torch.bfloat16, torch.float32
#: Padded buckets, empty shards on four ranks, rows that cut blocks, a bucket tied over the root.
NAMES = ("conv_linear", "tied_embedding", "unequal_units")


def policy(recipe: Recipe) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(F32, weight_codec=Float8Reference(recipe))


def wrong_weights(toy: Sharded, recipe: Recipe) -> list[str]:
    """In a rank: weights in a forward pass that are not the whole tensor's, over two steps."""
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.05, foreach=False))
    history: list[dict[str, torch.Tensor]] = []
    found = []
    for cycle in range(3):
        main = toy.full_parameters()
        for key, value in weights_seen(toy).items():
            if key not in main:  # a tied weight goes by its first name
                continue
            earlier = [step[key] for step in history]
            expected = quantised(recipe, main[key], toy.dtype, earlier)
            if not torch.equal(expected, value):
                found.append(f"{toy.name} {recipe} step {cycle}: {key}")
        history.append(main)
        toy.run_cycle(2, cycle)
        optimizer.step()
        optimizer.zero_grad()
    return found


def with_bf16_weights(recipe: Recipe, gathers: str) -> list[str]:
    """In a rank."""
    codec = Float8Reference(recipe, gathers)  # type: ignore[arg-type]
    return [
        line
        for name in NAMES
        for line in wrong_weights(
            shard(
                name,
                "optim_grads_params",
                4,
                B16,
                mixed_precision_policy=MixedPrecisionPolicy(F32, weight_codec=codec),
            ),
            recipe,
        )
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recipe", "gathers"),
    [
        ("mxfp8", "recipe"),
        ("delayed", "compute"),
        pytest.param("block", "compute", marks=pytest.mark.nightly),
    ],
)
def test_bf16_weights_are_those_that_one_process_quantises(
    ranks: RankPool, recipe: Recipe, gathers: str
) -> None:
    assert ranks.run(with_bf16_weights, recipe, gathers) == [[]] * WORLD


class Wide(nn.Module):
    """One unit, of blocks that are whole, cut at the edge, and cut by a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(300, 150, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(x).square().mean()


def wide(recipe: Recipe, gathers: str = "recipe") -> tuple[list[tuple[str, str, int]], bool]:
    """In a rank: what a forward and backward pass and a step send; whether weights are right."""
    torch.manual_seed(0)
    model = fully_shard_model(
        Wide().to(B16),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(
            F32,
            weight_codec=Float8Reference(recipe, gathers),  # type: ignore[arg-type]
        ),
    )
    main = gather_full(model.module.unit.weight)
    seen: list[torch.Tensor] = []
    model.module.unit.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    model.wire_log.clear()
    model(torch.ones(2, 300, dtype=B16)).backward()
    model.install_optimized_model_weights()
    sent = sorted((r.operation, r.dtype, r.payload_bytes) for r in model.wire_log)
    right = torch.equal(seen[0], quantised(recipe, main, B16))
    return sent, right


@pytest.mark.processes
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_byte_on_the_wire_is_accounted_for(ranks: RankPool, recipe: Recipe) -> None:
    weights = 150 * 300
    gradients = ("reduce_scatter", "bfloat16", 2 * weights)
    blocks = {"delayed": 1, "current": 1, "block": 2 * 3, "mxfp8": 5 * 300}[recipe]
    maxima = ("all_reduce", "float32", 4 * blocks)
    rows = [("all_gather", "uint8", weights)]
    if recipe == "mxfp8":
        rows += [("all_gather", "uint8", 150 * 10)]
    columns = [("all_gather", "uint8", weights)]
    for sent, right in ranks.run(wide, recipe):
        assert right
        assert sent == sorted([*rows, *columns, maxima, gradients])


@pytest.mark.processes
def test_weights_gathered_in_bf16_take_twice_the_bytes_and_give_the_same(ranks: RankPool) -> None:
    for sent, right in ranks.run(wide, "block", "compute"):
        assert right
        assert Counter(sent)["all_gather", "bfloat16", 2 * 150 * 300] == 2


def at_rest(recipe: Recipe) -> tuple[dict[str, int], ...]:
    """In a rank: the ledger between steps, what the memory model says, and the ledger's peak."""
    toy = shard("linear_stack", "optim_grads_params", 2, B16, mixed_precision_policy=policy(recipe))
    toy.run_cycle(1)
    toy.model.zero_grad_buffer()
    expected = memory_at_rest(
        facts_of("linear_stack", B16),
        parse_strategy("optim_grads_params"),
        Coordinate(mesh(2).get_local_rank("dp"), 2),
        PolicyNames(),
        codec=Float8Reference(recipe),
    )
    ledger = toy.model.ledger
    return ledger.bytes_by_category(), expected.bytes_by_category(), ledger.peak_bytes_by_category()


@pytest.mark.processes
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_at_rest_is_that_of_shards(ranks: RankPool, recipe: Recipe) -> None:
    for ledger, expected, peak in ranks.run(at_rest, recipe):
        assert ledger == expected
        # Three units of 142 weights and a head of 24 + 4 with padding, halved, in FP32: no copy.
        assert ledger["main_weights"] == 4 * (3 * 142 + 28) // 2
        assert peak["main_weights"] == ledger["main_weights"]


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="delayed, current, block and mxfp8"):
        Float8Reference("nvfp4")  # type: ignore[arg-type]


def losses_around_a_load(recipe: Recipe) -> tuple[float, float, float]:
    """In a rank: of a trained model, of a new one, and of that one with the first one's weights."""
    trained, fresh = (
        shard("linear_stack", "optim_grads_params", 2, B16, mixed_precision_policy=policy(recipe))
        for _ in range(2)
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(trained.model.parameters(), lr=0.5))
    trained.run_cycle(1)
    optimizer.step()
    before = fresh.backward()
    fresh.model.zero_grad_buffer()
    fresh.model.load_state_dict(trained.model.state_dict())
    return trained.backward(), before, fresh.backward()


@pytest.mark.processes
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_weights_that_are_loaded_are_encoded_again(ranks: RankPool, recipe: Recipe) -> None:
    for trained, before, loaded in ranks.run(losses_around_a_load, recipe):
        assert trained != before
        assert loaded == trained


def after_a_broadcast() -> dict[str, torch.Tensor]:
    """In a rank: what modules see, where the second rank had larger weights for two forwards."""
    toy = shard("linear_stack", "no_shard", 2, F32, mixed_precision_policy=policy("delayed"))
    toy.forward()
    with torch.no_grad():
        for parameter in toy.model.parameters():
            parameter.mul_(1 + 50 * mesh(2).get_local_rank("dp"))
    toy.forward()
    toy.model.broadcast_params()
    toy.model.install_optimized_model_weights()  # as a step does, from maxima of weights before
    return weights_seen(toy)


@pytest.mark.processes
def test_ranks_that_were_made_equal_compute_with_equal_codes(ranks: RankPool) -> None:
    first, second, *_ = ranks.run(after_a_broadcast)
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def loaded_and_seen() -> tuple[float, float]:
    """In a rank: the largest weight that was loaded, and that modules compute with."""
    toy = shard(
        "linear_stack", "optim_grads_params", 2, F32, mixed_precision_policy=policy("delayed")
    )
    toy.forward()
    state = {name: 50 * weight for name, weight in toy.model.state_dict().items()}
    toy.model.load_state_dict(state)
    matrices = (value for value in weights_seen(toy).values() if value.dim() > 1)
    return max(float(w.full_tensor().abs().max()) for w in state.values() if w.dim() > 1), max(
        float(value.abs().max()) for value in matrices
    )


@pytest.mark.processes
def test_delayed_scaling_cuts_off_no_weight_that_was_loaded(ranks: RankPool) -> None:
    """Maxima of the weights before a load would."""
    for loaded, seen in ranks.run(loaded_and_seen):
        assert seen == pytest.approx(loaded, rel=1 / 16)
