"""Runs that are too unlike to be compared, what compares all the same, and what is doubtful."""

from __future__ import annotations

import json

import pytest
from recorded_runs import TINY, Arm, Recorded, record_arms, record_run, resolved_run, write_plan

from bench.cli.baseline import SaveVerb
from bench.cli.compare import CompareVerb
from bench.cli.gate import GateVerb, gate_code
from bench.errors import NotComparableError
from bench.spec import TrainSpec
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.compare.baseline import make_baseline
from reports.compare.judge import judge
from reports.compare.samples import imported_samples
from reports.compare.sides import samples_of, sides_of_arms, sides_of_baseline, sides_of_sweeps
from reports.compare.text import headline, outcome_blocks, to_data
from reports.compare.unlike import (
    Pace,
    comparable_rates,
    norm_without_loss,
    rate_without_time,
    text_of,
    unlike,
    unlike_paces,
)
from reports.renderers.render import render

LLAMA = Workload(
    framework="megatron-lm", model="Llama 8B", device="H100", ranks=8, global_batch=128,
    seq_len=4096, batch=8, compute_dtype="bf16", main_grads_dtype="fp32",
)  # fmt: skip


def train(batch: int = 4, length: int = 128) -> TrainSpec:
    return TrainSpec(steps=20, global_batch=batch, micro_batch=2, seq_len=length, warmup_steps=5)


def other(**changes) -> Workload:
    return LLAMA.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch": 256}, "global batch 128, 256"),
        ({"batch": 16}, "batch (of how many devices is not said) 8, 16"),
        ({"seq_len": 8192}, "sequence length 4,096, 8,192"),
        ({"ranks": 16}, "number of devices 8, 16"),
        ({"device": "NVIDIA H200"}, "device H100, NVIDIA H200"),
        ({"model": "Llama 70B"}, "model Llama 8B, Llama 70B"),
        ({"compute_dtype": "fp8"}, "compute dtype bf16, fp8"),
        ({"main_grads_dtype": "bf16"}, "dtype of main gradients fp32, bf16"),
        ({"ranks": 16, "seq_len": 1}, "number of devices 8, 16; sequence length 4,096, 1"),
        # What says less, or the same in other words, is no difference; nor is what nobody says.
        ({"device": "NVIDIA H100 80GB HBM3", "model": "llama3-8b"}, ""),
        ({"compute_dtype": "torch.bfloat16", "main_grads_dtype": "float32"}, ""),
        (dict.fromkeys(("model", "device", "ranks", "global_batch", "compute_dtype")), ""),
        ({"steps": 7, "micro_batch": 2, "engine": "fsdp2", "framework": "torchtitan"}, ""),
    ],
)
def test_each_thing_that_must_agree_is_named_with_both_values(changes, said):
    assert text_of(unlike(LLAMA, other(**changes))) == said


def test_two_kinds_of_one_device_are_two_devices():
    kinds = ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3")
    base, head = (other(device=device) for device in kinds)
    assert text_of(unlike(base, head)) == f"device {', '.join(kinds)}"


def test_models_of_one_name_and_other_sizes_are_unlike_within_one_framework():
    base, head = other(layers=32), other(layers=30)
    assert text_of(unlike(base, head)) == "model of 32 layers, of 30 layers"
    assert unlike(base, head.model_copy(update={"framework": "nemo"})) == ()


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"global_batch": 256}, {"tokens/s": 1.6, "tokens/s per device": 1.6}),
        ({"ranks": 16}, {"tokens/s per device": 0.4}),  # that of all devices is no news
        ({"model": "Llama 70B"}, {}),
        ({"device": "H200"}, {}),
    ],
)
def test_rates_per_second_and_per_device_compare_where_only_sizes_differ(changes, rates):
    head = other(**changes)
    tokens = head.tokens_per_step / 1.25  # of one second, and 1.25 of them
    base = Pace(LLAMA, 1000.0, float(LLAMA.tokens_per_step))
    found = comparable_rates(unlike(LLAMA, head), base, Pace(head, 1250.0, tokens))
    assert {one.name: pytest.approx(one.ratio) for one in found} == rates


def log(work: Workload, *steps: ImportedStep):
    return imported_samples(ImportedRun("x", work, Provenance(kind="imported"), steps))


def test_where_no_length_is_known_the_sequences_are_counted():
    base, head = (other(seq_len=None, global_batch=n, ranks=None) for n in (128, 256))
    logs = log(base, ImportedStep(3, 3261.0)), log(head, ImportedStep(3, 3831.0))
    (rate,) = comparable_rates(unlike(base, head), *(samples.pace for samples in logs))
    assert (rate.name, round(rate.ratio, 3)) == ("samples/s", 1.702)


def test_batches_of_other_tokens_are_unlike_though_no_sequence_is_counted(store):
    plain = Workload(framework="automodel")
    fixed, budget = {1: 16400, 2: 16380}, {1: 9000, 2: 42000}
    found = unlike_paces(Pace(plain, tokens=fixed), Pace(plain, tokens=budget))
    assert text_of(found) == "tokens per step 16,380 to 16,400, 9,000 to 42,000"
    near = {1: 16390, 2: 16400, 3: 900}
    assert unlike_paces(Pace(plain, tokens=fixed), Pace(plain, tokens=near)) == ()
    for name, tokens in (("a", fixed), ("b", budget)):
        keep(store, name, plain, *(ImportedStep(n, loss=1.0, tokens=t) for n, t in tokens.items()))
    assert "tokens per step" in headline(judge(sides_of_sweeps(store, "a", "b")))


@pytest.mark.parametrize(
    ("changes", "tokens", "said"),
    [
        ({}, 8192, "tokens per step 4,096, 8,192"),
        ({"global_batch": 256}, 4096, "global batch 128, 256"),
        ({"seq_len": 8192}, 4096, "sequence length 4,096, 8,192"),
        ({"ranks": 16}, 4096, "number of devices 8, 16"),
        ({"device": "NVIDIA H200"}, 4096, "device H100, NVIDIA H200"),
        ({"model": "Llama 70B"}, 4096, "model Llama 8B, Llama 70B"),
        ({"parameters": 2}, 4096, "model of 1 parameters, of 2 parameters"),
        ({"compute_dtype": "fp8"}, 4096, "compute dtype bf16, fp8"),
        ({"main_grads_dtype": "bf16"}, 4096, "dtype of main gradients fp32, bf16"),
    ],
)
def test_a_saved_baseline_knows_what_its_log_said(store, changes, tokens, said):
    for name, work, counted in (
        ("base", other(parameters=1), 4096),
        ("head", other(**{"parameters": 1} | changes), tokens),
    ):
        steps = (ImportedStep(n, 100.0, 2.5, tokens=counted) for n in range(1, 101))
        keep(store, name, work, *steps)
    SaveVerb(name="kept", sweep="base", results=store.root).run()
    answer = GateVerb(sweep="head", baseline="kept", results=store.root).run()
    assert answer.code == 5
    assert answer.text().startswith(f"not comparable: {said}")


def keep(store, name: str, workload: Workload, *steps: ImportedStep) -> None:
    log = Provenance(kind="imported", source=f"{name}.log", importer="megatron")
    store.imports.write(ImportedRun(name, workload, log, steps))


def logged(milliseconds: float, teraflops: float, *, loss: float | None = 2.9, norm: float = 1.1):
    return [
        ImportedStep(n, milliseconds, loss, norm, teraflops_per_device=teraflops)
        for n in (8, 9, 10)
    ]


def compared(store, capsys, base: str, head: str) -> tuple[int, str, dict]:
    answer = CompareVerb(base=base, head=head, results=store.root).run()
    return answer.show(), capsys.readouterr().out, answer.data


def test_unlike_logs_have_that_as_their_headline_and_rates_in_the_place_of_times(store, capsys):
    keep(store, "main", LLAMA, *logged(3261.0, 410.0))
    keep(store, "patch", other(global_batch=256), *logged(3831.0, 698.0, loss=2.95))
    code, text, data = compared(store, capsys, "main", "patch")
    assert (code, text.splitlines()[0]) == (5, "not comparable: global batch 128, 256")
    assert "step time, median" not in text
    assert data["parity"]["differences"] == []  # of losses, which no such step shares
    assert data["outcome"] == "not comparable: global batch 128, 256"
    ratios = {one["name"]: round(one["ratio"], 3) for one in data["parity"]["changes"]}
    assert ratios == dict.fromkeys(("tokens/s", "tokens/s per device", "TFLOP/s per device"), 1.702)


def test_other_numbers_of_devices_compare_per_device_and_their_losses_do(store, capsys):
    keep(store, "main", other(seq_len=8192), *logged(10921.0, 400.0))
    keep(store, "after", other(seq_len=8192, ranks=16), *logged(5901.0, 370.0))
    code, text, data = compared(store, capsys, "main", "after")
    assert (code, text.splitlines()[0]) == (5, "not comparable: number of devices 8, 16")
    ratios = {one["name"]: round(one["ratio"], 3) for one in data["parity"]["changes"]}
    assert ratios == {"tokens/s per device": 0.925, "TFLOP/s per device": 0.925}
    assert data["parity"]["differences"][0]["largest"] == 0


def test_a_log_and_a_measured_sweep_that_are_unlike_are_refused_alike(store, capsys):
    write_plan(store, [("only", resolved_run())], sweep="ours")
    record_run(store, Recorded(resolved_run(), cell="only", sweep="ours"))
    keep(store, "theirs", Workload(framework="x", global_batch=8), *logged(100.0, 1.0))
    code, text, _ = compared(store, capsys, "theirs", "ours")
    assert (code, text.splitlines()[0]) == (5, "not comparable: global batch 8, 4")
    keep(store, "alike", Workload(framework="x", global_batch=4), *logged(100.0, 1.0))
    code, text, _ = compared(store, capsys, "alike", "ours")
    assert (code, text.splitlines()[0].split()[0]) == (0, "ms")


def test_a_rate_that_moves_without_the_time_is_the_formulas(store, capsys):
    keep(store, "main", LLAMA, *logged(68588.3, 9.33))
    keep(store, "branch", LLAMA, *logged(68588.3, 1.423))
    code, text, data = compared(store, capsys, "main", "branch")
    assert code == 0
    assert data["parity"]["doubts"] == [
        "TFLOP/s per device 0.153x at the same step time (0.00 %): formula, model or device"
        " count differ"
    ]
    assert data["parity"]["doubts"][0] in text


@pytest.mark.parametrize(
    ("time", "rate", "told"),
    [(1.009, 0.5, 1), (0.991, 1.031, 1), (1.0, 1.029, 0), (1.011, 0.5, 0), (None, 0.5, 0)],
)
def test_a_rate_is_doubted_from_three_per_cent_where_time_stays_within_one(time, rate, told):
    assert len(rate_without_time(time, {"TFLOP/s": rate, "tokens/s": None})) == told


def curve(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


LOSSES = curve(1.521, 1.402, 1.744, 1.85), curve(1.521, 1.402, 1.741, 1.855)


def test_norms_that_differ_steadily_at_equal_loss_are_named_with_their_factor():
    norms = curve(4.8, 4.02, 5.96, 3.92), curve(1.66, 1.51, 3.2, 2.1)
    said = norm_without_loss(LOSSES, norms)
    assert "head / base 0.456x (0.346x to 0.537x) over 4 steps, losses within 0.27 %" in said
    equal = curve(4.8, 4.02, 5.96, 3.92), curve(4.82, 4.05, 5.93, 3.95)
    assert norm_without_loss(LOSSES, equal) == ""
    # Not steady, few steps, or a loss that moves too.
    assert norm_without_loss(LOSSES, (norms[0], curve(1.66, 8.0, 3.2, 9.9))) == ""
    assert norm_without_loss(LOSSES, (curve(4.8, 4.0), curve(1.6, 1.5))) == ""
    assert norm_without_loss((LOSSES[0], curve(1.3, 1.2, 1.5, 1.7)), norms) == ""


@pytest.mark.parametrize(
    ("factor", "words"),
    [(8.0, "is the number of devices (8)"), (8**-0.5, "is the root of the number of devices (8)")],
)
def test_a_factor_of_the_devices_is_called_that(factor, words):
    norms = curve(4.8, 4.02, 5.96), curve(*(factor * one for one in (4.8, 4.02, 5.96)))
    assert words in norm_without_loss(LOSSES, norms, devices=8)
    assert words not in norm_without_loss(LOSSES, norms)


def recorded(store, sweep: str, *batches: int, **changes) -> None:
    cells = {f"b{n}": resolved_run("mfsdp", "optim", train=train(batch), **changes)
             for n, batch in enumerate(batches)}  # fmt: skip
    record_arms(store, {None: Arm()}, sweep=sweep, blocks=2, cells=cells)


def test_sweeps_of_other_batches_are_not_comparable_and_no_verdict_is_given(store, capsys):
    recorded(store, "small", 4)
    recorded(store, "large", 8)
    result = judge(sides_of_sweeps(store, "small", "large"))
    assert headline(result) == "not comparable: global batch 4, 8"
    assert (gate_code(result, strict=False), result.judgements) == (5, ())
    rates = {one["name"]: one["ratio"] for one in to_data(result)["rates"]}
    assert rates == dict.fromkeys(("tokens/s", "tokens/s per device"), pytest.approx(2.0, rel=0.2))
    assert "rate that compares: b0: tokens/s per device" in render(outcome_blocks(result))
    answer = GateVerb(sweep="large", against="small", results=store.root).run()
    assert (answer.code, json.loads(json.dumps(answer.data))["exit_code"]) == (5, 5)
    with pytest.raises(NotComparableError, match=r"^not comparable: global batch 4, 8; .*--ignore"):
        compared(store, capsys, "small", "large")
    # Who names the setting has both.
    sides = sides_of_sweeps(store, "small", "large", ["train.global_batch"])
    assert judge(sides).judgements


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": train(length=256)}, "sequence length 128, 256"),
        ({"ranks": 4}, "number of devices 2, 4"),
        ({"dtype": "bf16"}, "compute dtype fp32, bf16"),
        ({"shape": TINY.model_copy(update={"layers": 5})}, "model of "),
    ],
)
def test_whatever_two_sweeps_are_unlike_in_is_the_headline(store, changes, said):
    for sweep, own in (("base", {}), ("head", changes)):
        cells = {"a": resolved_run("mfsdp", "optim", **own)}
        record_arms(store, {None: Arm()}, sweep=sweep, blocks=1, cells=cells)
    answer = GateVerb(sweep="head", against="base", results=store.root).run()
    assert answer.code == 5
    assert answer.text().startswith(f"not comparable: {said}")


def test_unlike_imports_have_no_verdict_of_a_gate_either(store):
    keep(store, "main", LLAMA, *logged(10921.0, 400.0))
    keep(store, "after", other(ranks=16), *logged(5901.0, 370.0))
    answer = GateVerb(sweep="after", against="main", results=store.root).run()
    assert (answer.code, answer.data["judgements"]) == (5, [])
    assert answer.text().startswith("not comparable: number of devices 8, 16")


def test_a_baseline_says_in_what_its_cell_was_unlike(store):
    recorded(store, "small", 4)
    recorded(store, "large", 8)
    cells = samples_of(store, "small")
    kept = make_baseline("main", "small", "2026-03-01T10:00:00.000Z", cells)
    result = judge(sides_of_baseline(store, "main", kept.cells, "large"))
    assert headline(result).startswith("not comparable: global batch 4, 8")


def test_arms_may_set_dtypes_but_not_the_size_of_the_work(store):
    for sweep, changes, said in (
        ("dtypes", {"dtype": "bf16"}, None),
        ("batch", {"train": train(8)}, "not comparable: global batch 4, 8"),
        ("model", {"shape": TINY.model_copy(update={"layers": 3})}, "not comparable: model of "),
    ):
        write_plan(store, [("a", resolved_run())], sweep=sweep, arms=["base", "head"])
        for arm, resolved in (("base", resolved_run()), ("head", resolved_run(**changes))):
            record_run(store, Recorded(resolved, cell="a", sweep=sweep, arm=arm, attempt=1))
        result = judge(sides_of_arms(store, sweep, None, None))
        assert result.nothing_comparable == (said is not None)
        assert said is None or headline(result).startswith(said)


def test_a_norm_that_regresses_alone_is_named_with_its_factor(store):
    for sweep, scale in (("base", 1.0), ("head", 3.0)):
        run = Recorded(resolved_run(), cell="a", sweep=sweep, norm_scale=scale)
        write_plan(store, [("a", resolved_run())], sweep=sweep)
        record_run(store, run)
    (norm,) = judge(sides_of_sweeps(store, "base", "head")).of("regressed")
    assert norm.metric == "grad_norm"
    assert "the loss does not: head / base 3.000x over 20 steps" in norm.reason


def test_a_log_of_norms_alone_is_judged_by_them(store):
    for name, norm in (("main", 1.0), ("patch", 3.0)):
        keep(store, name, LLAMA, *logged(100.0, 1.0, loss=None, norm=norm))
    (norm,) = judge(sides_of_sweeps(store, "main", "patch")).of_metric("grad_norm")
    assert norm.verdict == "regressed"
