"""Validations on disk, as text and in reports, and the failures that engines are known for."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.known_failures import KNOWN_FAILURES, PAGE, KnownFailure, of_case, of_program
from bench.spec.engine_lookup import find_engine
from bench.store import DamagedRecordError, ResultsStore
from bench.validate.fuzz.drawing import draw
from bench.verdict import CaseVerdict, CheckVerdict, Finding, ValidationRecord
from reports.findings import find
from reports.renderers import html, markdown
from reports.renderers.document import Document
from reports.renderers.validation_text import to_terminal
from reports.sections.validation import validation_section, verdict_lines

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
    assert store.validations.newest() == RECORD


def test_a_failure_says_where_and_what_and_shows_its_evidence() -> None:
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


ROOT = Path(__file__).parents[2]
#: Programs of an engine: enough that what its scope refuses, which few have, is among them.
DRAWN = 1000


def row(one: KnownFailure) -> str:
    """As the page has it."""
    design = "yes" if one.by_design else ""
    script = f"[script]({one.script})" if "/" in one.script else f"`{one.script}`"
    shown = f"`--case '{one.cases}'`" if one.cases else "as above"
    shown = script if one.script else shown
    engines = ", ".join(one.engines)
    return f"| {engines} | {one.does} | {one.happens} | {one.versions} | {design} | {shown} |"


def test_the_page_has_a_row_for_each_and_no_other() -> None:
    page = (ROOT / PAGE).read_text()
    table = re.search(r"^\| engine \| what one does .*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table is not None
    assert table[1].splitlines() == [row(one) for one in KNOWN_FAILURES]


@pytest.mark.parametrize("one", KNOWN_FAILURES, ids=lambda one: f"{one.engines[0]}: {one.does}")
def test_each_can_be_recognised_and_shown(one: KnownFailure) -> None:
    assert all(find_engine(engine) for engine in one.engines)
    assert bool(one.cases) == bool(one.check)
    assert one.cases or one.kind or one.script
    assert "/" not in one.script or (ROOT / "docs" / one.script).is_file()
    re.compile(one.said)


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
    assert found is None or found.by_design == (case == CASE)


OFF = "cycle 1, pass 1: gradient of first.weight is off by 0.1 of 0.7"
STEP = "cycle 1, pass 2: weight after the step of first.weight is off by 0.1 of 0.7"
NOT_NONE = "cycle 1: gradient of x is not None, in plain torch it is None"
RESET = "RuntimeError: Connection reset by peer\nin cycle 1, completing the gradients"
FINISHED = "RuntimeError: Expected to have finished reduction in the prior iteration"
READY = "RuntimeError: Expected to mark a variable ready only once."
ASSERTED = "RuntimeError: expect_autograd_hooks_ INTERNAL ASSERT FAILED"
SAVED = "AssertionError: should use `_saved_grad_shard`"
REDUCED = "AssertionError: The parameter last.bias has already been reduced."
OTHER = "RuntimeError: another"
FAILING_BACKWARD = "pass failing backward"
UNUSED = "find_unused_parameters=True"
#: Of each row with a script: the text and the features of a program that it describes, and those of
#: one that is much alike and new.
PROGRAMS = {
    "fsdp2-reentrant-twice": [(OFF, "letter K"), (OFF, "letter C")],
    "fsdp2-exception-in-a-backward-pass": [(OFF, FAILING_BACKWARD), (OFF, "pass failing forward")],
    "fsdp2-exception-in-a-recomputation": [(OFF, "pass failing recompute"), (OFF, "letter c")],
    "fsdp2-exception-in-a-forward-pass": [
        (f"RuntimeError: {end}", "pass failing forward") for end in ("full_tensor", "another")
    ],
    "fsdp2-ranks-on-other-paths": [(RESET, f"differing paths {one}") for one in (True, False)],
    "ddp-two-backward-passes-of-one-graph": [
        (OFF, "last double"), (OFF, "pass double , last micro"),
    ],
    "ddp-unit-left-out": [(OFF, "letter s"), (OFF, f"letter s, {UNUSED}")],
    "": [(FINISHED, "letter s"), (FINISHED, f"letter s, {UNUSED}")],
    "ddp-unit-under-reentrant-checkpoint": [(READY, "letter k"), (OTHER, "letter k")],
    "ddp-static-graph-and-no-sync": [(ASSERTED, "static_graph=True"), (ASSERTED, "letter r")],
    "deepspeed-unit-left-out": [(NOT_NONE, "letter s"), (OFF, "letter s")],
    "deepspeed-unit-twice-under-reentrant-checkpoint": [
        ("AssertionError", f"letter {one}") for one in "Kk"
    ],
    "deepspeed-steps-without-a-backward-pass": [("KeyError: 0", ""), ("KeyError: 'w'", "")],
    "deepspeed-exception-in-a-backward-pass": [
        (REDUCED, FAILING_BACKWARD), (OTHER, FAILING_BACKWARD),
    ],
}  # fmt: skip


@cache
def had_by_programs(engine: str) -> set[frozenset[str]]:
    return {draw(engine, 7, number).features() for number in range(DRAWN)}


OF_PROGRAMS = [one for one in KNOWN_FAILURES if one.kind]


@pytest.mark.parametrize("one", OF_PROGRAMS, ids=lambda one: f"{one.engines[0]}: {one.does}")
def test_a_program_is_known_by_how_it_ends_and_what_it_has(one: KnownFailure) -> None:
    (text, has), (other_text, other_has) = PROGRAMS[Path(one.script).stem]
    for engine in one.engines:
        for kind in one.kind.split("|"):
            assert of_program(engine, kind, text, set(has.split(", "))) is one
            assert of_program(engine, kind, other_text, set(other_has.split(", "))) is None
        assert of_program(engine, "refused", text, set(has.split(", "))) is None
    assert of_program("mfsdp", one.kind.split("|")[0], text, set(has.split(", "))) is None


@pytest.mark.parametrize("one", OF_PROGRAMS, ids=lambda one: f"{one.engines[0]}: {one.does}")
def test_programs_of_the_engine_can_have_what_a_row_names(one: KnownFailure) -> None:
    for features in (*one.features, one.without):
        assert any(features <= has for e in one.engines for has in had_by_programs(e)), features


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
    lines = to_terminal(OF_DDP).splitlines()
    begin = lines.index(f"ddp: 1 cases passed, 2 failed (1 known, 1 new); what is known: {PAGE}")
    first, second, *others = lines[begin + 1 :]
    assert first == "  new    ddp/no_shard/2/stack/fp64/k3: gradients"
    assert second.startswith("  known  a state dict with a missing entry is loaded: ")
    assert second.endswith("(in 1 cases)")
    assert len(others) == sum("ddp" in one.engines for one in KNOWN_FAILURES) - 1
    assert all(line.endswith("(no case asks it)") for line in others)


def test_the_summary_says_of_a_known_failure_that_its_cases_passed() -> None:
    def said(*cases: CaseVerdict) -> str:
        record = OF_DDP.model_copy(
            update={"engines": ("examples.engines.deepspeed:build",), "cases": cases}
        )
        (line,) = [x for x in to_terminal(record).splitlines() if "known  BF16 in stage 3" in x]
        return line[line.rindex("(") :]

    case = "examples.engines.deepspeed:build/optim_grads_params/2/stack/bf16/k2"
    passed = CaseVerdict(case=case, engine="examples.engines.deepspeed:build", state="passed")
    other = passed.model_copy(update={"case": "deepspeed/optim/2/stack/fp32/k2"})
    refused = passed.model_copy(update={"state": "not_applicable", "reason": "no such axis"})
    unasked = CheckVerdict(check="gradients", state="not_applicable", reason="it has none")
    assert said(passed, passed.model_copy(update={"case": f"{case}/again"}), other) == (
        "(its 2 cases passed)"
    )
    assert said(other, refused, passed.model_copy(update={"checks": (unasked,)})) == (
        "(no case asks it)"
    )
    assert said(failing(case, "replicas")) == "(its 1 cases fail of others first)"


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
