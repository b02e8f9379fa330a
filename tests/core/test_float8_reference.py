"""FP8 weights: ranks compute with what one process makes of the whole tensor, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.testing.quantised import quantised
from conformance.judging import same
from mfsdp_core import (
    MixedPrecisionPolicy,
    fully_shard_model,
    gather_full,
)
from mfsdp_core.plan.recipes import Recipe
from mfsdp_core.precision.float8_reference import Float8Reference
from oracle.ranks import mesh
from oracle.sharded import Sharded, shard, weights_seen

pytestmark = pytest.mark.on_ranks

RECIPES: tuple[Recipe, ...] = ("delayed", "current", "block", "mxfp8")
B16, F32 = torch.bfloat16, torch.float32
#: Padded buckets, empty shards on four ranks, rows that cut blocks, a bucket tied over the root.
NAMES = ("conv_linear", "tied_embedding", "unequal_units")


def policy(recipe: Recipe, gathers: str = "recipe") -> MixedPrecisionPolicy:
    codec = Float8Reference(recipe, gathers)  # type: ignore[arg-type]
    return MixedPrecisionPolicy(F32, weight_codec=codec)


def stack(
    recipe: Recipe, strategy: str = "optim_grads_params", dtype: torch.dtype = F32
) -> Sharded:
    return shard("linear_stack", strategy, 2, dtype, mixed_precision_policy=policy(recipe))


class Wide(nn.Module):
    """One unit, of blocks that are whole, cut at the edge, and cut by a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(300, 150, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(x).square().mean()


@pytest.mark.parametrize(
    ("recipe", "gathers"), [*((recipe, "recipe") for recipe in RECIPES), ("block", "compute")]
)
def test_every_byte_on_the_wire_is_accounted_for(recipe: Recipe, gathers: str) -> None:
    """Of a forward and backward pass and a step; gathered in BF16, twice the bytes, weights are
    the same."""
    model = fully_shard_model(
        Wide().to(B16),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=policy(recipe, gathers),
    )
    main = gather_full(model.module.unit.weight)
    seen: list[torch.Tensor] = []
    model.module.unit.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    model.wire_log.clear()
    model(torch.ones(2, 300, dtype=B16)).backward()
    model.install_optimized_model_weights()
    same("weights", seen[0], quantised(recipe, main, B16))
    sent = sorted((r.operation, r.dtype, r.payload_bytes) for r in model.wire_log)
    weights = 150 * 300
    blocks = {"delayed": 1, "current": 1, "block": 2 * 3, "mxfp8": 5 * 300}[recipe]
    wanted = [("reduce_scatter", "bfloat16", 2 * weights), ("all_reduce", "float32", 4 * blocks)]
    if gathers == "compute":
        wanted += [("all_gather", "bfloat16", 2 * weights)] * 2
    else:
        wanted += [("all_gather", "uint8", weights)] * 2
    if recipe == "mxfp8":
        wanted += [("all_gather", "uint8", 150 * 10)]
    same("sent", sent, sorted(wanted))


def test_ranks_that_were_made_equal_compute_with_equal_codes() -> None:
    """Where the second rank had larger weights for two forward passes."""
    toy = stack("delayed", "no_shard")
    toy.forward()
    with torch.no_grad():
        for parameter in toy.model.parameters():
            parameter.mul_(1 + 50 * mesh(2).get_local_rank("dp"))
    toy.forward()
    toy.model.broadcast_params()
    toy.model.install_optimized_model_weights()  # as a step does, from maxima of weights before
    own = weights_seen(toy)
    both = [own, own]
    dist.all_gather_object(both, own, group=mesh(2).get_group("dp"))
    same("weights", both[1], both[0])


def test_delayed_scaling_cuts_off_no_weight_that_was_loaded() -> None:
    """Maxima of the weights before a load would."""
    toy = stack("delayed")
    toy.forward()
    state = {name: 50 * weight for name, weight in toy.model.state_dict().items()}
    toy.model.load_state_dict(state)
    seen = max(float(value.abs().max()) for value in weights_seen(toy).values() if value.dim() > 1)
    loaded = max(float(w.full_tensor().abs().max()) for w in state.values() if w.dim() > 1)
    assert seen == pytest.approx(loaded, rel=1 / 16)
