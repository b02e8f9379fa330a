"""FLOPs by formula, against published numbers and what torch counts, and the peaks of devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.derive.flops import FORMULA, HYBRID_FORMULA, flops_per_global_batch, formula
from bench.derive.peaks import PEAKS, model_flops_utilisation
from bench.models import state_space
from bench.models.build import build_model
from bench.resolve.presets import PRESETS
from bench.spec import ModelShape

LLAMA_8B = PRESETS["llama3-8b"]


@pytest.mark.parametrize(
    ("milliseconds", "tflops", "seq_len", "gpus"),
    [(10925.4, 617.5, 8192, 8), (10424.1, 647.2, 8192, 8), (2793.4, 268.8, 1024, 8)],
)
def test_published_pairs_of_milliseconds_and_tflops_are_reproduced(
    milliseconds, tflops, seq_len, gpus
):
    flops = flops_per_global_batch(LLAMA_8B, seq_len, 128)
    found = flops / (milliseconds / 1e3) / 1e12 / gpus
    assert found == pytest.approx(tflops, rel=1e-3)
    mfu = model_flops_utilisation(found, "NVIDIA H100 80GB HBM3", "bf16")
    assert mfu.fraction == pytest.approx(tflops / 989.4, rel=1e-3)


@pytest.mark.parametrize(("seq_len", "batch"), [(0, 1), (1, 0)])
def test_an_empty_batch_is_refused(seq_len, batch):
    with pytest.raises(ValueError, match="at least 1"):
        flops_per_global_batch(LLAMA_8B, seq_len, batch)


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


@pytest.mark.parametrize("pattern", ["E", "-", "*/-/*"])
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
    assert [formula(one) for one in (LLAMA_8B, shape)] == [FORMULA, HYBRID_FORMULA]
    per_token = flops_per_global_batch(shape, 1, 1)
    # 3.2 billion parameters are active per token by the model's card, the lookup not counted.
    assert per_token / 6 == pytest.approx(3.2e9, rel=0.02)
    assert per_token / 6 < shape.parameters / 8


@example("H100")
@example("nvidia h100 pcie")
@example("NVIDIA H100 PCIe ")
@given(st.text())
def test_any_other_name_has_no_peak(name):
    found = model_flops_utilisation(1.0, name, "bf16")
    assert (found.peak_tflops is not None) == (name in PEAKS)
    assert name in PEAKS or found.reason == f"unknown device: {name}"


def test_parts_of_one_family_have_their_own_peaks_and_a_dtype_without_units_none():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")
    assert [PEAKS[name].bf16_tflops for name in names] == [989.4, 756.0, 835.0]
    for name, dtype in (("NVIDIA A100-SXM4-80GB", "fp8"), ("NVIDIA H100 PCIe", "fp32")):
        assert PEAKS[name].tflops(dtype) is None
        assert f"no {dtype} peak known" in model_flops_utilisation(1.0, name, dtype).reason


@pytest.mark.parametrize(
    ("tflops", "device", "said"),
    [
        (0.05, None, "CPU"),
        (100.0, "NVIDIA GeForce RTX 9090", "NVIDIA GeForce RTX 9090"),
        (1757.0, "NVIDIA A100-SXM4-80GB", "invalid: 563 %"),  # more than the peak is withheld
    ],
)
def test_a_utilisation_that_cannot_be_known_says_why(tflops, device, said):
    mfu = model_flops_utilisation(tflops, device, "bf16")
    assert mfu.fraction is None
    assert (mfu.peak_tflops is None) == (device not in PEAKS)
    assert said in mfu.reason


@given(
    st.floats(0, 1e5),
    st.sampled_from(sorted(PEAKS)),
    st.sampled_from(["bf16", "fp16", "fp8", "fp32"]),
)
def test_a_utilisation_is_never_above_one_nor_without_a_reason(tflops, name, dtype):
    mfu = model_flops_utilisation(tflops, name, dtype)
    if mfu.fraction is None:
        assert mfu.reason
    else:
        assert 0 <= mfu.fraction <= 1
        assert mfu.fraction * (PEAKS[name].tflops(dtype) or 0) == pytest.approx(tflops)
