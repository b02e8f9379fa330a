"""Texts that hold several runs, and what the lines above a run call it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.importers.labels import facts_of, label_of
from bench.importers.table import read_text
from bench.workload import ImportedRun

LOGS = Path(__file__).parent / "logs"
LINE = "iteration {:4d}/ 500 | elapsed time per iteration (ms): {} | lm loss: 2.0 |\n"
NCCL = (
    "n1:7:8 [4] NCCL INFO ReduceScatter: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n"
)


def read(text: str | bytes) -> list[ImportedRun]:
    return read_text("page", [text.encode() if isinstance(text, str) else text], None, {})


def labels(text: str) -> list[tuple[str, list[int]]]:
    return [(run.provenance.label, [step.step for step in run.steps]) for run in read(text)]


def file(name: str) -> list[ImportedRun]:
    return read((LOGS / name).read_bytes())


def test_of_two_columns_that_say_the_same_the_first_is_ours() -> None:
    table = (
        "| run | Median step time (ms) | Mean step time (ms) |\n|---|---|---|\n| a | 10 | 12 |\n"
    )
    ((step,),) = (run.steps for run in read(table))
    assert (step.milliseconds, step.extra["Mean step time (ms)"]) == (10.0, 12.0)


def test_every_line_of_the_pull_requests_is_imported_under_its_label() -> None:
    runs = [*file("pr3067.txt"), *file("pr4133.txt")]
    told = [
        (
            run.provenance.label.partition(" (")[0].partition(",")[0],
            *(
                (step.step, step.milliseconds, round((step.device_peak_bytes or 0) / 2**20, 2))
                for step in run.steps
            ),
            len(run.nccl),
        )
        for run in runs
    ]
    assert told == [
        ("Main Branch", (100, 10925.4, 0), 0),
        ("Mixed-Precision", (100, 10893.1, 60039.38), 0),
        ("Mixed Precision", (100, 10424.1, 60646.15), 0),
        ("Llama 70B Main Branch", (100, 3300.5, 0), 0),
        ("Llama 70B Mixed Precision", (100, 2559.1, 0), 0),
        ("HFSDP 4-Node", (100, 2845.5, 0), 0),
        ("Main", (100, 2793.4, 0), 0),
        ("Optim Bug-Fix", (100, 2776.0, 0), 0),
        ("A loss that moved under HFSDP with BF16", 13),
        ("FP32 Activations", (100, 19961.1, 0), 0),
        ("Main Branch FSDP", (100, 3789.9, 33573.09), 0),
        ("Mixed-Precision HFSDP", (100, 3779.1, 33573.09), 0),
        ("Mixed-Precision HFSDP", (100, 3685.9, 0), 0),
        ("HFSDP BF16 Comm + FP32 Reduce / Accum + NCCL UBR", (100, 3482.6, 0), 0),
        ("NaN check of all gradients", (6, 11512.2, 0), 0),
        ("No FusedAdam Master Weights", (100, 3263.1, 27022.17), 0),
        ("FusedAdam Master Weights", (100, 3149.4, 30852.31), 0),
    ]


def test_the_words_in_brackets_are_the_stated_configuration() -> None:
    runs = {run.id: run for run in file("pr3067.txt")}
    four = runs["hfsdp-4-node-bf16-comm-fp32-reduce-accum-nccl"]
    assert four.provenance.stated == ("DP-Outer=2, DP-Shard=16",)
    assert (runs["main"].workload.model, runs["main"].workload.seq_len) == ("Llama 8B", 1024)
    assert len(runs) == len(file("pr3067.txt")), "every run has a name of its own"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # The nearest label names the run.
        ("## Heading\n\n- a bullet\n\n# base (x)\n{1}", [("base (x)", [1])]),
        # A heading that lost its mark in a browser does, too.
        ("Base branch\n\n{1}\nHead branch\n\n{2}", [("Base branch", [1]), ("Head branch", [2])]),
        # Between lines, what is called a side and nothing else does; a word of a log does not.
        ("main:\n{1}PR:\n{2}", [("main", [1]), ("PR", [2])]),
        ("# Llama\nPR (x):\n{1}main:\n{2}", [("Llama: PR (x)", [1]), ("Llama: main", [2])]),
        ("8x H100, seq 4096\n\nPR:\n{1}", [("8x H100, seq 4096: PR", [1])]),
        ("# main\n{1}PR:\n{2}", [("main", [1]), ("PR", [2])]),
        ("{1}saving:\n{2}", [("", [1, 2])]),
        # Lines without a label between them are one run.
        ("{1}" + "warning: something\n" * 20 + "{2}----- end -----\n{3}", [("", [1, 2, 3])]),
        # A bullet far above a line does not cut a log, and one can be the line itself.
        ("{1}- a note\n" + "other output\n" * 9 + "{2}", [("", [1, 2])]),
        ("- {1}- {2}", [("", [1, 2])]),
    ],
)
def test_what_stands_above_lines_names_their_run(text: str, told: list[tuple[str, list[int]]]):
    lines = [LINE.format(step, 5.0) for step in range(4)]
    assert labels(text.format(*lines)) == told


@pytest.mark.parametrize(
    "label",
    ["# base", "### base", "* base", "• base", "1. base", "**base**:", "> - base", "  - `base`"],
)
def test_comments_bullets_headings_and_quotes_name_runs(label: str) -> None:
    fenced = f"{label}\n```\n{LINE.format(3, 5.0)}```\n"
    assert labels(fenced + fenced.replace("base", "head")) == [("base", [3]), ("head", [3])]


def test_lines_of_nccl_belong_to_the_run_that_their_label_opens() -> None:
    first, second = read("# base\n" + LINE.format(1, 5.0) + NCCL + "# head\n" + NCCL * 2)
    assert (len(first.nccl), len(second.nccl), second.steps) == (1, 2, ())


def test_a_page_of_several_frameworks_is_read_run_by_run() -> None:
    titan = "step: 1  loss: 2.5  grad_norm: 1.0  memory: 1.00GiB(1.00%)  tps: 10\n"
    runs = read("# one\n" + LINE.format(1, 5.0) + "# two\n" + titan)
    assert [run.provenance.importer for run in runs] == ["megatron", "torchtitan"]
    assert runs[1].provenance.lines == (4, 4)


@pytest.mark.parametrize("line", ["-----", "* * *", "- 3.5", "plain words", "#define X"])
def test_what_is_no_label(line: str) -> None:
    assert label_of(line) is None


@pytest.mark.parametrize(
    ("label", "facts"),
    [
        ("Llama 70B @ 1K SeqLen", {"model": "Llama 70B", "seq_len": 1024}),
        ("Llama-3.1-8B, seq_len=4096", {"model": "Llama-3.1-8B", "seq_len": 4096}),
        ("main (SeqLen 8,192)", {"seq_len": 8192}),
        ("main, 8,192 sequence length", {"seq_len": 8192}),
        ("main (seq len 4.5K)", {}),
        ("main, seq 4096, GBS 128", {"seq_len": 4096, "global_batch": 128}),
        ("gbs 128 seq 4096 mbs 2", {"seq_len": 4096, "global_batch": 128, "micro_batch": 2}),
        ("seq=8k global batch size of 1,024", {"seq_len": 8192, "global_batch": 1024}),
        (
            "GBS512, micro-batch-size: 1, 4k context",
            {
                "seq_len": 4096,
                "global_batch": 512,
                "micro_batch": 1,
            },
        ),
        ("global_batch_size=64 local_batch_size=4", {"global_batch": 64, "micro_batch": 4}),
        ("max_seq_len: 2048, context length 2048", {"seq_len": 2048}),
        # Ranges, amounts of tokens, two numbers, and what only counts.
        ("global batch 4M tokens, seq 4096-8192, GBS 64 -> 128", {}),
        ("seq 4096 against seq 8192", {}),
        ("Sequence 2: AdamW; consequence 4096", {}),
        ("global batch of 524,288 tokens, batch 128", {}),
        ("BF16 comm", {}),
    ],
)
def test_a_label_states_model_and_sequence(label: str, facts: dict[str, object]) -> None:
    assert facts_of(label) == facts


def test_text_between_a_heading_and_its_lines_states_facts() -> None:
    log = "step 1: loss 2.5, time 1.5 s\n"
    first, second = read(f"## main, 8 H100\n\nseq 4096, gbs=128\n\n{log}\n## PR\n{log}")
    assert first.provenance.label == "main, 8 H100"
    work = first.workload
    assert (work.ranks, work.seq_len, work.global_batch) == (8, 4096, 128)
    assert (second.provenance.label, second.workload.seq_len) == ("PR", None)
    text = f"## main\n\nAs run here:\n\n{log}\nand with the PR:\n\n```\n{log}"
    assert [run.provenance.label for run in read(text)] == ["main", "and with the PR"]
    (alone,) = read(f"seq_len=4096 gbs=128\n\n{log}")
    assert (alone.workload.seq_len, alone.workload.global_batch) == (4096, 128)


def test_a_spreadsheet_begins_with_the_mark_of_its_encoding() -> None:
    (run,) = read(b"\xef\xbb\xbfstep,loss\n1,2.5\n2,2.4\n")
    assert [(step.step, step.loss) for step in run.steps] == [(1, 2.5), (2, 2.4)]


def test_carriage_returns_colours_and_bad_bytes_are_passed_over() -> None:
    text = b"\xef\xbb\xbf\x1b[32m# base\x1b[0m\r\n\xff\xfe bar\r" + LINE.format(1, 5.0).encode()
    (run,) = read(text)
    assert [step.milliseconds for step in run.steps] == [5.0]


def public(name: str) -> list[ImportedRun]:
    return read((LOGS / "public" / name).read_bytes())


#: Framework and steps of a public log, and numbers of its last step as they stand there.
PUBLIC = {
    "torchtitan_2389.log": (
        "torchtitan",
        [4, 5],
        {"loss": 7.07623, "grad_norm": 46.5, "teraflops_per_device": 313.36},
    ),
    "torchtitan_1287.log": ("torchtitan", [200, 210], {"tokens_per_second_per_device": 5593}),
    "deepspeed_1825.log": (
        "deepspeed",
        [40, 50],
        {"learning_rate": 5e-05, "device_peak_bytes": round(9.02 * 2**30)},
    ),
    "deepspeed_2629.log": ("deepspeed", [17, 18], {"CurrSamplesPerSec": 145.0889530760849}),
    "nemo_740.log": ("nemo", [121, 122], {"loss": 1.288, "milliseconds": pytest.approx(31.63)}),
    "nemo_bar_55.log": ("nemo", [795], {"loss": 3.09}),
    "trainer_89.log": ("transformers", [1], {"device_peak_bytes": round(6.32 * 2**30)}),
    "trainer_state.json": ("transformers", [50, 100], {"loss": 1.3879}),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_logs_are_read(name: str) -> None:
    framework, steps, numbers = PUBLIC[name]
    (run,) = public(name)
    assert (run.workload.framework, [step.step for step in run.steps]) == (framework, steps)
    last = run.steps[-1]
    assert {key: (dataclasses.asdict(last) | last.extra)[key] for key in numbers} == numbers
