"""The corpus: what the parser proves is what the specification says, file by file."""

from __future__ import annotations

import pytest

import corpus_cases as cases
from reports.nccl.audit import audit_paths
from reports.nccl.rows import VerdictRow


def shown(row: VerdictRow, expected: str) -> str:
    """The row in the words of the table, with the details that the expectation names."""
    words = [row.operation, str(row.size_bytes), row.phase or "-", str(row.verdict)]
    if "condition=" in expected:
        words.append(f"condition={row.reason.condition.replace(' ', '_')}" if row.reason else "")
    if "missing=" in expected:
        condition = f"(condition={row.reason.condition})" if row.reason.condition else ""
        words.append(f"missing={','.join(row.reason.missing)}{condition}")
    return " ".join(words)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_the_verdicts_are_those_of_the_specification(case):
    audit = audit_paths([cases.CORPUS / cases.file_name(case)])
    rows = sorted(audit.rows, key=lambda r: (r.operation, r.size_bytes, r.phase, r.verdict))
    wanted = sorted(case.expected, key=lambda line: (line.split()[0], line))
    by_key = {" ".join(line.rsplit(" ", line.count("=") and 1)[0:1]): line for line in wanted}
    found = []
    for row in rows:
        plain = shown(row, "")
        found.append(shown(row, by_key.get(plain, "")))
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_damage_is_counted(case):
    unread = audit_paths([cases.CORPUS / cases.file_name(case)]).job.unread
    assert (unread.damaged > 0) == case.damaged


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_line_is_of_the_one_host_that_printed_it(case):
    hosts = audit_paths([cases.CORPUS / cases.file_name(case)]).job.hosts
    assert hosts <= {"node1"}


def test_the_files_are_those_that_the_table_describes(tmp_path):
    cases.write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (cases.CORPUS / path.name).read_bytes(), path.name
    assert len(list(cases.CORPUS.iterdir())) == len(cases.CASES) + 1
    assert len(cases.CASES) >= 60
