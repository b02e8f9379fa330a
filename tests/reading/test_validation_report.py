"""Validations on disk, as text and in reports, and the failures that engines are known for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.errors import DamagedRecordError, UsageError
from bench.known_failures import KNOWN_FAILURES, PAGE, of_case
from bench.spec.engine_table import find_engine
from bench.store import ResultsStore
from bench.verdict import CaseVerdict, CheckVerdict, Finding, ValidationRecord
from reports.findings import find
from reports.renderers.document import Document, Section
from reports.renderers.render import render
from reports.sections.validation import validation_blocks, validation_section, verdict_lines

FINDING = Finding(
    parameter="blocks.0.up.weight",
    step=2,
    microbatch=1,
    rank=1,
    expected="[0.5]",
    found="[1.0]",
    evidence=("rank 1's gradient of microbatch 1 counts 1 times, expected 0.5", "<script>x"),
)
FAILED = CheckVerdict(check="gradients", state="failed", finding=FINDING)
RECORD = ValidationRecord(
    id="validation-20260101T000000Z-0001",
    engines=("mfsdp",),
    wanted="quick",
    started_utc="2026-01-01T00:00:00.000Z",
    ended_utc="2026-01-01T00:00:49.500Z",
    cases=(
        CaseVerdict(
            case="mfsdp/a",
            engine="mfsdp",
            state="failed",
            settings={"does": "a step on a stack"},
            checks=(FAILED,),
        ),
        CaseVerdict(
            case="mfsdp/b",
            engine="mfsdp",
            state="passed",
            checks=(CheckVerdict(check="gradients", state="passed"),),
        ),
        CaseVerdict(case="mfsdp/c", engine="mfsdp", state="not_applicable", reason="no such axis"),
    ),
)


def test_a_validation_reads_back_as_it_was_written(store: ResultsStore) -> None:
    store.validations.write(RECORD)
    assert store.validations.read("0001") == RECORD
    with pytest.raises(UsageError, match="0 validations"):
        store.validations.read("0002")
    # A damaged one is named and hides no older one.
    newer = RECORD.model_copy(update={"id": "validation-20260102T000000Z-0002"})
    store.validations.write(newer).write_text("{")
    with pytest.raises(DamagedRecordError):
        store.validations.read("0002")
    assert store.validations.newest() == RECORD


def test_a_failure_says_where_and_what_and_shows_its_evidence() -> None:
    for changes, said in (
        (
            {},
            [
                "3 cases: 1 passed, 1 failed, 1 not applicable, in 49.5 s (",
                "gradients: blocks.0.up.weight, step 2, microbatch 1, rank 1",
                *(
                    "does      a step on a stack",
                    "expected  [0.5]",
                    "found     [1.0]",
                    "counts 1 times, expected 0.5",
                ),
                "no such axis",
            ],
        ),
        ({"ended_utc": None}, ["1 not applicable (0.0 s of processor time"]),
    ):
        text = render(validation_blocks(RECORD.model_copy(update=changes)))
        assert [words for words in said if words not in text] == []


def test_the_report_has_a_section_on_correctness_where_something_was_validated(
    store: ResultsStore,
) -> None:
    assert list(validation_section(find(store, []))) == []
    store.validations.write(RECORD)
    section = Section("validation", "Correctness", tuple(validation_section(find(store, []))))
    document = Document("title", "", (section,), "")
    page, text = render(document, "html"), render(document, "md")
    for rendered in (page, text):
        assert "Correctness" in rendered
        assert "blocks.0.up.weight" in rendered
    assert "<script>x" not in page


ROOT = Path(__file__).parents[2]


def test_the_page_has_each_that_validate_marks() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", (ROOT / PAGE).read_text(), re.MULTILINE)
    names = {
        one: re.sub(r"examples\.engines\.(\w+):build", r"\1", ", ".join(one.engines))
        for one in KNOWN_FAILURES
    }
    assert {(names[one], one.does) for one in KNOWN_FAILURES} <= set(rows)
    assert all(find_engine(engine) for one in KNOWN_FAILURES for engine in one.engines)


def failing(case: str, *checks: str) -> CaseVerdict:
    verdicts = tuple(CheckVerdict(check=check, state="failed") for check in checks)
    return CaseVerdict(
        case=case, engine=case.split("/", maxsplit=1)[0], state="failed", checks=verdicts
    )


CASE = "ddp/no_shard/2/stack/fp32/k1/reloaded"
WEIGHTS, GRADIENTS = ("computed weights", "gradients"), ("gradients",)
BF16 = "examples.engines.deepspeed:build/optim_grads_params/2/stack/bf16/k2"


@pytest.mark.parametrize(
    ("case", "checks", "measured", "known"),
    [
        # By the check that fails first.
        (CASE, WEIGHTS, "", True),
        (CASE, GRADIENTS, "", False),
        (CASE.removesuffix("/reloaded"), WEIGHTS, "", False),
        (CASE.replace("ddp", "mfsdp"), WEIGHTS, "", False),
        # A larger error than the known one is new.
        (BF16, GRADIENTS, "relative difference 0.0097, allowed the rounding bound", True),
        (BF16, GRADIENTS, "relative difference 0.5, allowed the rounding bound", False),
        (BF16, GRADIENTS, "relative difference nan, allowed the rounding bound", False),
        (BF16, GRADIENTS, "", False),
    ],
)
def test_a_case_is_known_by_its_engine_its_first_check_and_its_error(
    case: str, checks: tuple[str, ...], measured: str, known: bool
) -> None:
    failed = [
        one.model_copy(update={"measured": measured}) for one in failing(case, *checks).checks
    ]
    found = of_case(case.partition("/")[0], case, failed)
    assert (found is not None) == known


OF_DDP = ValidationRecord(
    id="validation-20260101T000000Z-0001",
    engines=("ddp",),
    started_utc="2026-01-01T00:00:00.000Z",
    cases=(
        failing("ddp/no_shard/2/stack/fp32/k1/reloaded", "computed weights", "gradients"),
        failing("ddp/no_shard/2/stack/fp64/k3", "gradients"),
        CaseVerdict(case="ddp/no_shard/1/stack/fp64/k3", engine="ddp", state="passed"),
    ),
)


def test_the_summary_marks_every_failure_known_or_new_a_line_each() -> None:
    lines = render(validation_blocks(OF_DDP)).splitlines()
    begin = lines.index(f"ddp: 1 cases passed, 2 failed (1 known, 1 new); what is known: {PAGE}")
    first, second = lines[begin + 1 :]
    assert first == "  new    ddp/no_shard/2/stack/fp64/k3: gradients"
    assert second == "  known  a state dict with a missing entry is loaded (in 1 cases)"


def test_a_report_says_of_each_engine_whether_it_was_right_by_its_newest_validation(store) -> None:
    assert verdict_lines(store, ["ddp", "fsdp2"]) == ()
    store.validations.write(OF_DDP)
    other = {"id": "validation-20260102T000000Z-0002", "engines": ("mfsdp",), "cases": ()}
    store.validations.write(OF_DDP.model_copy(update=other))
    ((engine, said),) = verdict_lines(store, ["ddp", "fsdp2"])
    assert engine == "ddp"
    assert said.startswith(
        "1 cases passed, 2 failed (1 known, 1 new) in the validation of 2026-01-01; "
    )
    for number, (wanted, interrupted, words) in enumerate(
        [
            ("full", False, " (full);"),
            ("quick, a selection", True, " (quick, a selection, interrupted);"),
            ("", True, " (interrupted);"),
        ]
    ):
        update = {"id": f"validation-20260201T000000Z-000{number}", "wanted": wanted}
        store.validations.write(OF_DDP.model_copy(update=update | {"interrupted": interrupted}))
        ((_, line),) = verdict_lines(store, ["ddp"])
        assert f" in the validation of 2026-01-01{words}" in line
