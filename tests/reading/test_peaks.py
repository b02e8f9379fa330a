"""The peak table: exact names only, null for the unknown, and no utilisation above 100 %."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.derive.peaks import PEAKS, model_flops_utilisation


def test_parts_of_one_family_have_their_own_peaks():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")
    assert [PEAKS[name].bf16_tflops for name in names] == [989.4, 756.0, 835.0]


@example("H100")
@example("nvidia h100 pcie")
@example("NVIDIA H100 PCIe ")
@given(st.text())
def test_any_other_name_has_no_peak(name):
    found = model_flops_utilisation(1.0, name, "bf16")
    assert (found.peak_tflops is not None) == (name in PEAKS)
    assert name in PEAKS or found.reason == f"unknown device: {name}"


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA A100-SXM4-80GB", "fp8"), ("NVIDIA H100 PCIe", "fp32")]
)
def test_a_dtype_without_units_has_no_peak(name, dtype):
    assert PEAKS[name].tflops(dtype) is None
    assert f"no {dtype} peak known" in model_flops_utilisation(1.0, name, dtype).reason


def test_every_entry_names_its_source():
    assert all(peak.source for peak in PEAKS.values())


def test_fp8_doubles_bf16_wherever_both_are_listed():
    for peak in PEAKS.values():
        if peak.fp8_tflops is not None:
            assert peak.fp8_tflops / peak.bf16_tflops == pytest.approx(2.0, rel=0.02)


def test_the_published_617_tflops_are_62_percent_of_an_h100():
    mfu = model_flops_utilisation(617.5, "NVIDIA H100 80GB HBM3", "bf16")
    assert mfu.fraction == pytest.approx(0.624, abs=5e-4)


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
