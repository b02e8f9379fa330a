"""What the evidence of two pull requests supports, and what each rule finds by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_runs import recorded_cell, resolved_run

from bench.cli.linting import PRESETS
from bench.errors import UsageError
from bench.importers.table import read_text
from reports.lint.check import Linted, lint, lint_runs, lint_text, silence
from reports.lint.presentation import to_data, to_github, to_markdown, to_terminal
from reports.lint.rules import RULES, LintFinding

LOGS = Path(__file__).parents[1] / "run" / "logs"
LINE = (
    "iteration {step:4d}/ 500 | elapsed time per iteration (ms): {ms} | throughput per GPU"
    " (TFLOP/s/GPU): {tflops} | global batch size: 128 | lm loss: {loss} | grad norm: {norm} |\n"
)


def linted(text: str, *ignore: str, **facts: str) -> Linted:
    runs = read_text("page", [text.encode()], None, facts)
    return lint([lint_text(runs, text.split("\n"), PRESETS)], [silence(one) for one in ignore])


def document(name: str) -> Linted:
    return linted((LOGS / f"{name}.txt").read_text())


def line(step: int = 100, ms: float = 1000.0, tflops: float = 100.0, loss: float = 2.0, norm=1.0):
    return LINE.format(step=step, ms=ms, tflops=tflops, loss=loss, norm=norm)


def found(linted: Linted, rule: str) -> list[LintFinding]:
    return [one for one in linted.findings if one.rule == rule]


@pytest.fixture(scope="module")
def pr3067() -> Linted:
    return document("pr3067")


@pytest.fixture(scope="module")
def pr4133() -> Linted:
    return document("pr4133")


def of(linted: Linted, rule: str, run: str) -> LintFinding:
    (one,) = (one for one in found(linted, rule) if one.run == run)
    return one


BF16 = "mixed-precision-bf16-comm-fp32-reduce-accum-via"
HFSDP = "hfsdp-4-node-bf16-comm-fp32-reduce-accum-nccl"
NAN = "nan-check-of-all-gradients-fully-shard-5-global"
IMPLIED = [
    ("main-branch", "llama3-8b", 8192, 8, 8.000),
    ("mixed-precision", "llama3-8b", 8192, 8, 7.999),
    (BF16, "llama3-8b", 8192, 8, 8.000),
    ("llama-70b-main-branch", "llama3-70b", 1024, 64, 63.99),
    ("llama-70b-mixed-precision", "llama3-70b", 1024, 64, 63.99),
    (HFSDP, "llama3-8b", 8192, 32, 31.996),
    ("fp32-activations", "llama3-8b", 4096, 8, 8.001),
    ("main", "llama3-8b", 1024, 8, 8.001),
    ("main-branch-fsdp", "llama3-8b", 1024, 8, 7.998),
    (NAN, "llama3-8b", 8192, 8, 8.000),
]


def test_sequence_and_devices_follow_from_time_and_throughput(
    pr3067: Linted, pr4133: Linted
) -> None:
    stated = {one.run: one.values for one in found(pr3067, "unstated_configuration")}
    names = ("model", "seq_len", "devices", "devices_exact")
    assert {run: tuple(stated[run][name] for name in names) for run, *_ in IMPLIED} == {
        run: (model, seq_len, devices, pytest.approx(exact, abs=6e-4))
        for run, model, seq_len, devices, exact in IMPLIED
    }
    usual = {run: one["usual_seq_len"] for run, one in stated.items() if "usual_seq_len" in one}
    assert usual == {"fp32-activations": 8192}
    values = of(pr4133, "unstated_configuration", "no-fusedadam-master-weights").values
    assert (values["model"], values["seq_len"], values["devices"]) == ("llama3-8b", 1024, 8)
    assert "model" in values["unstated"]


@pytest.mark.parametrize(
    ("head", "base", "changes"),
    [
        ("mixed-precision", "main-branch", {"time": -0.30, "loss": -0.045}),
        (BF16, "main-branch", {"time": -4.59, "throughput": 4.8}),
        (
            *("llama-70b-mixed-precision", "llama-70b-main-branch"),
            {"time": -22.5, "throughput": 28.97},
        ),
        (NAN, "main-branch", {"time": 5.37, "loss": None}),  # of other iterations: no change
        ("no-fusedadam-master-weights", "fusedadam-master-weights", {"time": 3.61}),
    ],
)
def test_changes_are_those_of_the_two_pull_requests(
    pr3067: Linted, pr4133: Linted, head: str, base: str, changes: dict[str, float | None]
) -> None:
    pairs = (*pr3067.pairs, *pr4133.pairs)
    (pair,) = (p for p in pairs if (p.head.name, p.base.name) == (head, base))
    found = {name: pair.values().get(f"{name}_change_percent") for name in changes}
    for name, change in changes.items():
        assert found[name] == (change and pytest.approx(change, abs=5e-2, rel=5e-3))


def test_tradeoffs_that_are_not_named(pr3067: Linted, pr4133: Linted) -> None:
    memory = of(pr3067, "tradeoff", BF16)
    assert memory.values["base"] == "mixed-precision"
    assert memory.values["allocated_change_mib"] == pytest.approx(1248.9, abs=5e-2)
    assert memory.values["max_allocated_change_mib"] == pytest.approx(606.8, abs=5e-2)
    assert memory.lines == (18, 19, 26, 27)
    time = of(pr4133, "tradeoff", "no-fusedadam-master-weights")
    assert "less memory, but slower" in time.text
    assert time.values["max_allocated_change_mib"] == pytest.approx(-3830, abs=0.5)
    assert time.values["max_allocated_change_percent"] == pytest.approx(-12.4, abs=5e-2)
    loss = of(pr3067, "tradeoff", HFSDP)
    assert loss.values["loss_change_percent"] == pytest.approx(4.73, abs=5e-3)
    assert loss.values["grad_norm_change_percent"] == pytest.approx(-26.8, abs=5e-2)
    assert "though parity is claimed" in loss.text


def test_claims_that_the_numbers_do_not_give(pr3067: Linted) -> None:
    reduction = of(pr3067, "claim_mismatch", "llama-70b-mixed-precision")
    assert (reduction.values["claimed"], reduction.values["reading"]) == (22.5, "time")
    assert reduction.values["throughput_change_percent"] == pytest.approx(28.97, abs=5e-3)
    none = of(pr3067, "claim_mismatch", HFSDP)
    assert none.values["ratios"] == pytest.approx([3.84, 3.83, 3.66], abs=5e-3)
    either = of(pr3067, "claim_mismatch", BF16)
    assert (either.level, either.values["reading"]) == ("note", "throughput or time")
    assert len(found(pr3067, "claim_mismatch")) == 3


def test_unlike_things_single_runs_and_parity_without_a_spread(pr3067: Linted) -> None:
    (iterations,) = found(pr3067, "unlike_iterations")
    assert iterations.run == NAN
    assert (iterations.values["base_iteration"], iterations.values["head_iteration"]) == (100, 6)
    (machines,) = found(pr3067, "unlike_machines")
    assert (machines.values["base_devices"], machines.values["head_devices"]) == (8, 32)
    assert {one.run for one in found(pr3067, "single_run")} == {p.head.name for p in pr3067.pairs}
    assert {one.run for one in found(pr3067, "no_spread")} == {
        "mixed-precision", BF16, HFSDP, "llama-70b-mixed-precision",
    }  # fmt: skip


def test_symmetric_kernels_that_nothing_shows(pr3067: Linted) -> None:
    shown = {
        (one.run, one.values.get("operation")): one.values["other_lines"]
        for one in found(pr3067, "no_engagement")
    }
    assert shown == {
        (BF16, None): 0,
        ("llama-70b-mixed-precision", None): 0,
        ("fp32-activations", None): 0,
        ("a-loss-that-moved-under-hfsdp-with-bf16", "ReduceScatter"): 6,
    }


def test_a_loss_after_which_there_is_none_is_not_compared_with_a_later_one() -> None:
    base, head = (
        "".join(line(step, loss=loss) for step, loss in enumerate(losses, 1))
        for losses in ((2.5, 2.0, 1.5), (2.5, 2.0, float("nan")))
    )
    shown = linted(f"# base\n{base}# head\n{head}")
    (pair,) = shown.pairs
    assert "loss_change_percent" not in pair.values()
    (iterations,) = found(shown, "unlike_iterations")
    assert (iterations.values["base_iteration"], iterations.values["head_iteration"]) == (3, 2)
    assert found(shown, "tradeoff") == []
    assert "33" not in to_terminal(shown), "nor in the table"


@pytest.mark.parametrize(("before", "after", "change"), [(-2.0, -1.0, 50), (-2.0, -3.0, -50)])
def test_a_negative_loss_that_rises_has_a_positive_change(before, after, change) -> None:
    (pair,) = linted(f"# base\n{line(loss=before)}# head\n{line(loss=after)}").pairs
    assert pair.values()["loss_change_percent"] == change


PAIR = "# base\n" + line() + "# head\n"


def test_a_claim_of_thousands_is_not_read_from_behind_its_comma() -> None:
    (claim,) = found(
        linted(f"# base\n{line()}# 1,000 % faster\n{line(ms=800.0)}"), "claim_mismatch"
    )
    assert claim.values["claimed"] == 1000.0


def test_a_tradeoff_that_is_named_is_none() -> None:
    memory = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {} |\n"
    text = "# base\n" + memory.format(100.0) + line() + "- {}\n# head\n" + memory.format(150.0)
    silent, named = (
        linted(text.replace("{}", words) + line(ms=900.0)) for words in ("new", "more memory")
    )
    assert [one.values["max_allocated_change_percent"] for one in found(silent, "tradeoff")] == [50]
    assert found(named, "tradeoff") == []


TABLE = """| run | step time (ms) | peak memory (GB) | {} |
|---|---|---|---|
| base | 1000 | 40 | - |
| head | 800 | 30 | {} |
"""
RATES = """| run | median tokens/second | peak memory (GB) | speed-up |
|---|---|---|---|
| a | 100 | 40 | |
| b | 125 | 40 | {} |
"""
TITAN = "".join(
    f"step: {n}  loss: 2.0  memory: 1.00GiB(1.00%)  tps: 90  tflops: 60.0  mfu: {n}0.00%\n"
    for n in (1, 2, 3)
)


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        *(
            (f"# base\n{line()}\n- {claim}\n{line(ms=800.0)}", reading)
            for claim, reading in (
                ("20 % faster", "time"),
                ("25 % faster", None),
                ("20 % less time", None),
                ("25,0 % faster", None),
                ("1,25x faster", None),
                ("1,025 % faster", "none"),
                ("25 % less time", "throughput"),
                ("30 % faster", "none"),
                ("1.25x faster", None),
                ("1.4x faster", "none"),
                ("20 % less memory", None),
                ("20 % of the data", None),
            )
        ),
        *(
            (TABLE.format(column, cell), reading)
            for column, cell, reading in (
                ("speed-up (%)", "25.0", None),
                ("speed-up (%)", "20", "time"),
                ("speed-up", "25%", None),
                ("speed-up", "35 %", "none"),
                ("speed-up", "1.25x", None),
                ("speed-up", "1.4", "none"),
                ("step time reduction", "25%", "throughput"),
                ("memory saved", "25%", None),
                ("memory saved", "40%", "none"),
                ("memory used", "40%", None),
                ("MFU", "40%", None),
            )
        ),
        # Rows that tell only a rate.
        (RATES.format("25%"), None),
        (RATES.format("35%"), "none"),
        # A claim far above a run is not about it, and earlier steps of a run are no prose.
        ("- 50 % faster\n" + "words\n" * 9 + PAIR + line(ms=990.0), None),
        (f"Before\n```\n{TITAN}```\n\nAfter\n```\n{TITAN}```\n", None),
    ],
)
def test_a_claim_is_held_against_the_numbers_that_it_is_about(text: str, reading) -> None:
    shown = linted(text)
    assert len(shown.runs) == 2
    claims = found(shown, "claim_mismatch")
    assert [one.values["reading"] for one in claims] == ([reading] if reading else [])
    assert all(one.lines == (4,) for one in claims if text.startswith("|"))


def test_norms_that_differ_by_the_number_of_devices() -> None:
    by_eight = found(linted(PAIR + line(norm=8.05), ranks="8"), "norm_scale")
    assert [one.values["factor"] for one in by_eight] == [8.05]
    assert found(linted(PAIR + line(norm=6.0), ranks="8"), "norm_scale") == []
    (root,) = found(linted(PAIR + line(norm=0.25), ranks="16"), "norm_scale")
    assert "the root of the number" in root.text


def test_more_than_a_peak_cannot_be() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert found(linted(line(tflops=900.0), device=h100), "impossible_utilisation") == []
    (above,) = found(linted(line(tflops=1000.0), device=h100), "impossible_utilisation")
    assert above.values["peak_teraflops"] == 989.4
    fp8 = "# FP8\n" + line(tflops=1000.0)
    assert found(linted(fp8, device=h100), "impossible_utilisation") == []
    titan = "# {}\nstep: 1  loss: 2.0  memory: 1.00GiB(1.00%)  tps: 9  tflops: 600.0  mfu: {}%\n"
    (against,) = found(linted(titan.format("MXFP8", 60.65)), "impossible_utilisation")
    assert against.values["mfu_fp8_percent"] == pytest.approx(30.32, abs=1e-2)
    assert found(linted(titan.format("BF16", 60.65)), "impossible_utilisation") == []
    assert len(found(linted(titan.format("BF16", 563.0)), "impossible_utilisation")) == 1


def test_what_is_stated_and_agrees_is_no_finding_and_what_does_not_is_one() -> None:
    text = "# Llama 8B @ SeqLen 8K\n" + line(ms=10925.4, tflops=617.5)
    facts = {"ranks": "8", "device": "NVIDIA H100 80GB HBM3"}
    assert found(linted(text, **facts), "unstated_configuration") == []
    (wrong,) = found(linted(text, **{**facts, "ranks": "16"}), "unstated_configuration")
    assert (wrong.values["stated_devices"], wrong.values["devices"]) == (16, 8)


def test_a_silenced_rule_is_shown_with_its_reason_and_is_not_open() -> None:
    text = PAIR + line(ms=900.0)
    facts = {"model": "x", "seq_len": "1", "ranks": "1", "device": "y"}
    assert [one.rule for one in linted(text, **facts).open] == ["single_run"]
    quiet = linted(text, "single_run@head=a first look", **facts)
    assert quiet.open == ()
    assert "[silenced: a first look]" in to_terminal(quiet)
    assert linted(text, "single_run@base=another run", **facts).open != ()
    for wrong in ("no_such_rule=why", "single_run", "single_run= "):
        with pytest.raises(UsageError, match="--ignore"):
            silence(wrong)


def test_every_form_says_rule_run_lines_and_values(pr4133: Linted) -> None:
    data = to_data(pr4133)
    assert {*data["findings"][0]} >= {"rule", "run", "lines", "values", "source", "silenced"}
    assert {one["rule"] for one in data["findings"]} <= {*RULES}
    assert data["runs"][0]["implied_devices"] == 8
    assert "| tradeoff | no-fusedadam-master-weights | 5, 6, 9, 10 |" in to_markdown(pr4133)
    annotations = to_github(pr4133)
    assert len(annotations) == data["open"]
    assert any(
        text.startswith("::warning file=page,line=10,title=tradeoff%3A no-fused")
        for text in annotations
    )


def test_measured_cells_are_looked_at_like_pasted_runs(store) -> None:
    cells = [recorded_cell(store, name, resolved_run()) for name in ("base", "head")]
    shown = lint([lint_runs([], cells, PRESETS)])
    assert {one.rule for one in shown.findings} == {"single_run"}
