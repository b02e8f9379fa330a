"""Reading what a crash, a full disk or a stray editor has left behind."""

from __future__ import annotations

import json
from itertools import product

import pytest
from stand_in_runs import finished_run

from bench.errors import DamagedRecordError
from bench.record import SCHEMA_VERSION
from bench.store import ResultsStore


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"null", b"[1]", b"1", b'{"step": 2}', b'{"step": "two"}', b"\xff\xfe", b""),
        *(b"[" * 100_000, b'{"rank": -1, "step": 2}', b"{}, {}"),
    ],
)
def test_a_broken_line_in_the_middle_is_left_out_and_named(
    store: ResultsStore, line: bytes
) -> None:
    folder = finished_run(store)
    lines = (folder.path / "steps.node0.jsonl").read_bytes().splitlines()
    lines[1] = line
    (folder.path / "steps.node0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    record = store.read(folder.run_id)
    assert [sample.step for sample in record.steps[0]] == [1, 3]
    assert len(record.problems) == 1
    assert record.problems[0].startswith("steps.node0.jsonl:2 was left out")


def test_many_broken_lines_are_counted_instead_of_listed(store: ResultsStore) -> None:
    folder = finished_run(store)
    (folder.path / "steps.node0.jsonl").write_bytes(b"junk\n" * 500)
    problems = store.read(folder.run_id).problems
    assert len(problems) < 10
    assert any("497 more such lines" in problem for problem in problems)


def test_a_sample_with_a_field_of_a_later_version_is_still_read(store: ResultsStore) -> None:
    folder = finished_run(store)
    lines = [
        json.loads(line) for line in (folder.path / "steps.node0.jsonl").read_text().splitlines()
    ]
    text = "".join(json.dumps(line | {"new_meter": 1}) + "\n" for line in lines)
    (folder.path / "steps.node0.jsonl").write_text(text)
    assert store.read(folder.run_id).problems == ()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *product(
            ("env.json", "memory.json", "status.json", "runtime.json"),
            (b"", b"{", b"[]", b"\xff", b'{"a": 1}{"b": 2}', b"[" * 100_000),
        ),
        *product(("env.json", "status.json"), (None,)),
        ("status.json", b'{"state": "splendid"}'),
    ],
)
def test_a_broken_or_missing_document_is_a_problem_and_not_an_exception(
    store: ResultsStore, name: str, content: bytes | None
) -> None:
    folder = finished_run(store)
    if content is None:
        (folder.path / name).unlink()
    else:
        (folder.path / name).write_bytes(content)
    record = store.read(folder.run_id)
    assert any(name in problem for problem in record.problems)
    assert len(record.steps[0]) == 3
    assert record.status.state == ("interrupted" if name == "status.json" else "ok")


def test_samples_of_a_rank_that_are_missing_from_a_good_run_are_a_problem(
    store: ResultsStore,
) -> None:
    folder = finished_run(store)
    lines = (folder.path / "steps.node0.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "steps.node0.jsonl").write_text(
        "".join(line for line in lines if '"rank": 0' in line)
    )
    assert store.read(folder.run_id).problems == ("no samples of rank 1",)


def test_a_status_of_a_newer_version_is_read_and_named(store: ResultsStore) -> None:
    folder = finished_run(store)
    status = json.loads((folder.path / "status.json").read_text())
    newer = status | {"schema_version": SCHEMA_VERSION + 1, "mood": "fine"}
    (folder.path / "status.json").write_text(json.dumps(newer))
    record = store.read(folder.run_id)
    assert record.status.state == "ok"
    assert any("newer version" in problem for problem in record.problems)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"shape": 1}', b"\xff", b"null"])
def test_a_run_without_a_readable_spec_is_damaged_and_hides_no_other(
    store: ResultsStore, content: bytes | None
) -> None:
    good, bad, also_good = (finished_run(store) for _ in range(3))
    spec = bad.path / "spec.json"
    if content is None:
        spec.unlink()
    else:
        spec.write_bytes(content)
    assert [record.run_id for record in store.records()] == [good.run_id, also_good.run_id]
    assert [record.run_id for record in store.records(sweep="s")] == [good.run_id, also_good.run_id]
    assert [damaged.run_id for damaged in store.outlines()[1]] == [bad.run_id]
    with pytest.raises(DamagedRecordError, match="spec\\.json"):
        store.read(bad.run_id)


def test_files_that_do_not_belong_there_are_ignored(store: ResultsStore) -> None:
    folder = finished_run(store)
    (store.root / "runs" / "notes.txt").write_text("hello")
    (folder.path / "steps.node0.jsonl.bak").write_text("hello")
    (folder.path / ".status.json.123.tmp").write_text("{")
    assert store.read(folder.run_id).problems == ()
    assert len(list(store.records())) == 1


def test_only_a_cut_off_line_is_dropped_when_the_writer_is_killed_between_two_bytes(
    store: ResultsStore,
) -> None:
    folder = finished_run(store)
    whole = (folder.path / "steps.node0.jsonl").read_bytes()
    for size in range(0, len(whole) + 1, 3):
        (folder.path / "steps.node0.jsonl").write_bytes(whole[:size])
        record = store.read(folder.run_id)
        lines = whole[:size].splitlines(keepends=True)
        kept = sum(line.endswith(b"\n") and b'"rank": 0' in line for line in lines)
        assert len(record.steps.get(0, [])) == kept
        said = "steps.node0.jsonl: the last line is cut off and was left out"
        assert (said in record.problems) == bool(lines and not lines[-1].endswith(b"\n"))
