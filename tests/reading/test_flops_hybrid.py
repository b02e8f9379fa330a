"""FLOPs of the hybrid family against what torch counts while the model runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.derive.flops import FORMULA, HYBRID_FORMULA, flops_per_global_batch, formula
from bench.models import state_space
from bench.models.build import build_model
from bench.resolve.presets import PRESETS
from bench.spec import ModelShape

ROWS, LENGTH = 2, 24
TINY = PRESETS["hybrid-tiny"]


def shape_of(pattern: str) -> ModelShape:
    assert TINY.hybrid is not None
    hybrid = TINY.hybrid.model_copy(update={"pattern": pattern})
    return TINY.model_copy(update={"hybrid": hybrid, "layers": len(pattern)})


def counted(shape: ModelShape) -> int:
    """FLOPs of matrix products in one forward and backward of the real model.

    In FP64, where every expert has a product of its own: torch does not count the grouped one.
    """
    model = build_model(shape, recompute="none", seed=1, device=torch.device("cpu")).double()
    tokens = torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    return counter.get_total_flops()


def not_in_the_formula(shape: ModelShape) -> float:
    """The router, and the upper half of the attention square, which torch's product computes."""
    assert shape.hybrid is not None
    tokens, pattern = ROWS * LENGTH, shape.hybrid.pattern
    router = 6 * shape.hidden * shape.hybrid.experts * pattern.count("E")
    half = 6 * LENGTH * shape.heads * shape.head_dim * pattern.count("*")
    return tokens * (router + half)


@pytest.mark.parametrize("pattern", ["*", "E", "-", "EE*-", "*/-/*"])
def test_the_formula_is_what_torch_counts(pattern):
    shape = shape_of(pattern)
    formula_flops = flops_per_global_batch(shape, LENGTH, ROWS)
    assert formula_flops + not_in_the_formula(shape) == counted(shape)


def test_of_a_mamba_block_torch_counts_the_projections_and_the_formula_adds_the_recurrence(
    monkeypatch,
):
    monkeypatch.setattr(state_space, "scan", lambda x, step, *_: x * step.unsqueeze(-1))
    shape = shape_of("M")
    hybrid = shape.hybrid
    recurrence = 3 * 7 * ROWS * LENGTH * hybrid.mamba_inner * hybrid.state
    assert flops_per_global_batch(shape, LENGTH, ROWS) - recurrence == counted(shape)


def test_nemotron_counts_its_active_parameters_and_not_all_of_them():
    shape = PRESETS["nemotron3-nano-30b"]
    per_token = flops_per_global_batch(shape, 1, 1)
    # 3.2 billion parameters are active per token by the model's card, the lookup not counted.
    assert per_token / 6 == pytest.approx(3.2e9, rel=0.02)
    assert per_token / 6 < shape.parameters / 8


def test_every_family_names_its_formula():
    assert formula(PRESETS["llama3-8b"]) == FORMULA
    assert formula(TINY) == HYBRID_FORMULA
