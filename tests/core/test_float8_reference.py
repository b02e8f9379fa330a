"""FP8 weights, and every byte that they take on the wire; the cases of `validate` train on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.testing.quantised import quantised
from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from mfsdp_core.plan.recipes import Recipe
from mfsdp_core.precision.float8_reference import Float8Reference
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks

RECIPES: tuple[Recipe, ...] = ("delayed", "current", "block", "mxfp8")
B16 = torch.bfloat16


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
    codec = Float8Reference(recipe, gathers)  # type: ignore[arg-type]
    model = fully_shard_model(
        Wide().to(B16),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, weight_codec=codec),
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
