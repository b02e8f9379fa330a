"""Validations on disk, as text and in reports."""

from __future__ import annotations

import pytest

from bench.errors import UsageError
from bench.store import DamagedRecordError, ResultsStore
from bench.verdict import BugVerdict, CaseVerdict, CheckVerdict, Finding, ValidationRecord
from reports.findings import find
from reports.renderers import html, markdown
from reports.renderers.document import Document
from reports.renderers.validation_text import to_terminal
from reports.sections.validation import validation_section

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
        CaseVerdict(case="mfsdp/a", engine="mfsdp", state="failed", checks=(FAILED,)),
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
    assert store.validations.newest(with_bugs=False) == RECORD


def test_a_failure_says_where_and_what_and_shows_its_evidence() -> None:
    bugs = (
        BugVerdict(bug="R1", title="added", outcome="caught", case="mfsdp/a", failure=FAILED),
        BugVerdict(bug="R2", title="scaled", outcome="missed", cases_run=9),
        BugVerdict(bug="R16", title="raced", outcome="not_applicable", reason="needs a GPU"),
    )
    for changes, said in (
        (
            {},
            [
                "3 cases: 1 passed, 1 failed, 1 not applicable, in 49.5 s (",
                "gradients: blocks.0.up.weight, step 2, microbatch 1, rank 1",
                *("expected  [0.5]", "found     [1.0]", "counts 1 times, expected 0.5"),
                "no such axis",
            ],
        ),
        ({"ended_utc": None}, ["1 not applicable (0.0 s of processor time"]),
        (
            {"bugs": bugs},
            ["1 caught, 1 missed, 0 broken, 1 not applicable", "R1 showed in mfsdp/a"],
        ),
    ):
        text = to_terminal(RECORD.model_copy(update=changes))
        assert [words for words in said if words not in text] == []


def test_the_report_has_a_section_on_correctness_where_something_was_validated(
    store: ResultsStore,
) -> None:
    assert validation_section(find(store, [])) is None
    store.validations.write(RECORD)
    section = validation_section(find(store, []))
    assert section is not None
    document = Document("title", "", (section,), "")
    page, text = html.render(document), markdown.render(document)
    for rendered in (page, text):
        assert "Correctness" in rendered
        assert "blocks.0.up.weight" in rendered
    assert "<script>x" not in page
