"""What engines are known to fail: one table, which the page, the summary and the report tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.known_failures import KNOWN_FAILURES, PAGE, KnownFailure, of_case, of_program
from bench.spec import engine_names
from bench.store import ResultsStore
from bench.verdict import CaseVerdict, CheckVerdict, ValidationRecord
from reports.renderers.validation_text import to_terminal
from reports.sections.validation import verdict_lines

ROOT = Path(__file__).parents[2]


def row(one: KnownFailure) -> str:
    """As the page has it."""
    design = "yes" if one.by_design else ""
    shown = f"[script]({one.script})" if one.script else f"`--case '{one.cases}'`"
    shown = shown if one.script or one.cases else "as above"
    engines = ", ".join(one.engines)
    return f"| {engines} | {one.does} | {one.happens} | {one.versions} | {design} | {shown} |"


def test_the_page_has_a_row_for_each_and_no_other() -> None:
    page = (ROOT / PAGE).read_text()
    table = re.search(r"^\| engine \| what one does .*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table is not None
    assert table[1].splitlines() == [row(one) for one in KNOWN_FAILURES]


@pytest.mark.parametrize("one", KNOWN_FAILURES, ids=lambda one: f"{one.engines[0]}: {one.does}")
def test_each_can_be_recognised_and_shown(one: KnownFailure) -> None:
    assert set(one.engines) <= set(engine_names())
    assert bool(one.cases) == bool(one.check)
    assert one.cases or one.kind
    assert not one.script or (ROOT / "docs" / one.script).is_file()
    re.compile(one.said)


def failing(case: str, *checks: str) -> CaseVerdict:
    verdicts = tuple(CheckVerdict(check=check, state="failed") for check in checks)
    return CaseVerdict(
        case=case, engine=case.split("/", maxsplit=1)[0], state="failed", checks=verdicts
    )


def test_a_case_is_known_by_its_engine_and_the_check_that_fails_first() -> None:
    case = "ddp/no_shard/2/stack/fp32/k1/reloaded"
    known = of_case("ddp", case, ["computed weights", "gradients"])
    assert known is not None
    assert known.by_design
    assert of_case("ddp", case, ["gradients"]) is None
    assert of_case("ddp", case.removesuffix("/reloaded"), ["computed weights"]) is None
    assert of_case("mfsdp", "mfsdp/no_shard/2/stack/fp32/k1/reloaded", ["computed weights"]) is None


def test_a_program_is_known_by_how_it_ends_and_what_it_has() -> None:
    left_out = of_program("ddp_zero", "differs", "cycle 1: gradient of x is off", {"letter s"})
    assert left_out is not None
    assert "find_unused_parameters" in left_out.does
    assert of_program("ddp_zero", "differs", "cycle 1: gradient of x is off", {"letter r"}) is None
    assert of_program("fsdp2", "differs", "cycle 1: gradient of x is off", {"letter s"}) is None
    raised = "RuntimeError: Expected to mark a variable ready only once."
    assert of_program("ddp", "raised", raised, set()) is not None
    assert of_program("ddp", "raised", "RuntimeError: another", set()) is None


RECORD = ValidationRecord(
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
    lines = to_terminal(RECORD).splitlines()
    begin = lines.index(f"ddp: 1 cases passed, 2 failed (1 known, 1 new); what is known: {PAGE}")
    first, second, *others = lines[begin + 1 :]
    assert first == "  new    ddp/no_shard/2/stack/fp64/k3: gradients"
    assert second.startswith("  known  a state dict that lacks an entry is loaded: ")
    assert second.endswith("(in 1 cases)")
    assert len(others) == sum("ddp" in one.engines for one in KNOWN_FAILURES) - 1
    assert all(line.endswith("(no case asks it)") for line in others)


def test_a_report_says_of_each_engine_whether_it_was_right_by_its_newest_validation(
    tmp_path: Path,
) -> None:
    store = ResultsStore.open(tmp_path / "results", create=True)
    assert verdict_lines(store, ["ddp", "fsdp2"]) == ()
    store.validations.write(RECORD)
    other = {"id": "validation-20260102T000000Z-0002", "engines": ("mfsdp",), "cases": ()}
    store.validations.write(RECORD.model_copy(update=other))
    ((engine, said),) = verdict_lines(store, ["ddp", "fsdp2"])
    assert engine == "ddp"
    assert said.startswith(
        "1 cases passed, 2 failed (1 known, 1 new) in the validation of 2026-01-01; "
    )
