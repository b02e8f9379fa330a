"""From raw samples to numbers: what is derived, what is withheld, and what is said about it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import TINY, in_memory, resolved_run, sample

from bench.derive.flops import flops_per_global_batch
from bench.derive.summary import common_steps, summarise, summary_formula
from bench.record import RunStatus, StepSample
from bench.spec import EngineSpec, LaunchSpec, MeasureSpec, ResolvedDtypes


def record(steps=None, *, state="ok", **changes):
    return in_memory(steps, status=RunStatus(state=state), **changes)


def sharded(**engine):
    return EngineSpec(name="mfsdp", strategy="optim", **engine)


def alike(ranks=2, **changes):
    """20 equal steps of every rank."""
    return {rank: [sample(i, **changes) for i in range(1, 21)] for rank in range(ranks)}


def test_numbers_are_of_all_ranks_by_the_slowest_and_the_largest_one():
    steps = {
        0: [sample(i, 100.0, rss_bytes=10 * i, loss=2.0) for i in range(1, 21)],
        1: [sample(i, 130.0, rss_bytes=500 - i, device_peak_bytes=70 + i) for i in range(1, 21)],
    }
    summary = summarise(record(steps))
    assert summary.step_milliseconds_median == 130.0
    assert summary.tokens_per_second == pytest.approx(2 * 256 / 0.13)
    flops = flops_per_global_batch(TINY, 128, 4)
    assert summary.tflops_per_second_per_device == pytest.approx(flops / 0.13 / 1e12 / 2)
    assert summary.formula == summary_formula(record().resolved)
    assert (summary.final_loss, summary.final_grad_norm) == (2.5, 1.0)
    assert (summary.rss_peak_bytes, summary.device_peak_bytes) == (499, 90)
    assert summary.wire_bytes_per_step == 2000


def test_what_one_rank_did_not_count_and_a_loss_that_is_no_number_are_unknown():
    steps = alike()
    steps[1] = [sample(i, wire_bytes=None, loss=math.nan) for i in range(1, 21)]
    summary = summarise(record(steps))
    assert (summary.wire_bytes_per_step, summary.final_loss) == (None, None)


def test_warm_up_steps_do_not_count():
    times = [3000.0, 800.0, 400.0, *[100.0 + i % 3 for i in range(17)]]
    steps = {r: [sample(i + 1, t) for i, t in enumerate(times)] for r in range(2)}
    summary = summarise(record(steps))
    assert summary.steady is not None
    assert summary.steady.first > 3
    assert summary.step_milliseconds_median == pytest.approx(101.0, abs=1.0)
    assert summary.step_milliseconds_p90 == 102.0


def test_a_drifting_run_has_losses_and_memory_but_no_times():
    steps = {r: [sample(i, 100.0 * 1.06**i) for i in range(1, 25)] for r in range(2)}
    summary = summarise(record(steps))
    assert summary.step_milliseconds_median is None
    assert summary.tokens_per_second is None
    assert summary.tflops_per_second_per_device is None
    assert summary.final_loss == 3.0
    assert summary.rss_peak_bytes == 500
    assert "not steady" in " ".join(summary.notes)


def test_a_failed_run_keeps_only_its_memory():
    summary = summarise(record(state="out_of_memory"))
    assert summary.steady is None
    assert summary.step_milliseconds_median is None
    assert summary.final_loss is None
    assert summary.rss_peak_bytes == 500
    assert "out_of_memory" in summary.notes[0]


@pytest.mark.parametrize(
    ("resolved", "says"),
    [
        (resolved_run(measure=MeasureSpec(profile="memory")), "no times: the run was profiled"),
        (resolved_run(measure=MeasureSpec(nvtx=True)), "no times: measure.nvtx names its parts"),
        *(
            (resolved_run().model_copy(update={"engine": sharded(**{axis: 2})}), "no bytes sent")
            for axis in ("tensor_parallel", "expert_parallel")
        ),
    ],
)
def test_a_profiled_run_has_no_times_and_other_parallelisms_are_not_passed_over(resolved, says):
    one = record(resolved=resolved)
    one.status.comparable_in_time = resolved.measure.comparable_in_time
    summary = summarise(one)
    lacks = "step_milliseconds_median" if "times" in says else "wire_bytes_per_step"
    assert getattr(summary, lacks) is None
    assert says in " ".join(summary.notes)


def test_a_hole_in_one_rank_ends_the_steps_that_count():
    steps = {0: [sample(i) for i in range(1, 21)], 1: [sample(i) for i in range(1, 21) if i != 12]}
    assert len(common_steps(steps)) == 11
    summary = summarise(record(steps))
    assert summary.steady is not None
    assert summary.steady.last == 11
    assert "11 of 20 steps" in " ".join(summary.notes)


def test_the_kernels_own_peak_counts_where_it_is_higher_than_the_samples():
    assert summarise(record(memory={"rss_peak_bytes": 900})).rss_peak_bytes == 900
    assert summarise(record(memory={"rss_peak_bytes": 3})).rss_peak_bytes == 500
    assert summarise(record(memory={"rss_peak_bytes": "high"})).rss_peak_bytes == 500


def test_tokens_that_contradict_the_configuration_are_pointed_out():
    summary = summarise(record(alike(tokens=100)))
    assert "200 tokens per step, the configuration says 512" in " ".join(summary.notes)


def test_the_ledger_survives_and_what_is_no_number_in_it_does_not():
    memory = {"by_category_bytes": {"gradients": 10, "junk": "many", "activations": math.nan}}
    assert summarise(record(memory=memory)).memory_by_category_bytes == {"gradients": 10}
    assert summarise(record(memory={"by_category_bytes": [1]})).memory_by_category_bytes == {}


def test_an_account_that_is_not_whole_has_no_peak_and_says_what_it_lacks():
    memory = {"by_category_bytes": {"main_weights": 10, "gradients": None}}
    summary = summarise(record(memory=memory))
    assert summary.ledger_peak_bytes is None
    assert "no ledger peak: the engine does not say its gradients" in summary.notes


def test_a_ledger_without_the_matrices_that_are_stepped_whole_has_no_peak():
    memory = {"ledger": {"peak_bytes": 10, "by_category_bytes": {"gradients": 10}}}
    for matrices, peak in (("needed", 10), ("whole", None)):
        spec = EngineSpec(name="mfsdp", strategy="optim", matrices=matrices)
        resolved = resolved_run().model_copy(update={"engine": spec})
        summary = summarise(record(resolved=resolved, memory=memory))
        assert summary.ledger_peak_bytes == peak
        assert any("lacks the whole matrices" in text for text in summary.notes) == (peak is None)


LOW = ResolvedDtypes(compute="bf16", main_params="fp32", main_grads="fp32", grad_comm="bf16")


@pytest.mark.parametrize(
    ("names", "milliseconds", "said"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, 100.0, None),
        *(
            (names, 100.0, "no MFU")
            for names in (["Odd"], [], None, "NVIDIA H100 PCIe", ["A", "B"])
        ),
        (["NVIDIA L40S"], 0.01, "invalid"),
    ],
)
def test_an_unknown_or_mixed_device_or_an_impossible_rate_has_no_mfu_but_a_note(
    names, milliseconds, said
):
    resolved = resolved_run(launch=LaunchSpec(ranks=2, device="cuda"), dtypes=LOW)
    environment = {"runtime": {"device_names": names}}
    steps = alike(milliseconds=milliseconds)
    summary = summarise(record(steps, resolved=resolved, environment=environment))
    if said is None:
        assert summary.mfu == pytest.approx((summary.tflops_per_second_per_device or 0) / 989.4)
        return
    assert summary.mfu is None
    assert summary.tflops_per_second_per_device is not None
    assert any(said in note for note in summary.notes)


anything = st.floats(allow_nan=True, allow_infinity=True)
samples = st.builds(
    StepSample,
    step=st.integers(-2, 30),
    milliseconds=anything,
    loss=anything,
    grad_norm=st.none() | anything,
    learning_rate=anything,
    tokens=st.integers(0, 1000),
    wire_bytes=st.none() | st.integers(0, 10**9),
    rss_bytes=st.integers(0, 10**9),
)


@given(
    st.dictionaries(st.integers(0, 3), st.lists(samples, max_size=30), max_size=3),
    st.sampled_from(["ok", "crashed", "unstable", "running"]),
)
@settings(deadline=None)
def test_no_samples_whatsoever_make_it_raise(steps, state):
    summary = summarise(record(steps, state=state))
    assert (summary.step_milliseconds_median is None) == (summary.step_milliseconds_p90 is None)
    for value in (summary.step_milliseconds_median, summary.final_loss):
        assert value is None or math.isfinite(value)
