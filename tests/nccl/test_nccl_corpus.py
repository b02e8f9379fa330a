"""The corpus: what the audit proves is what the specification says, file by file.

`corpus/EXPECTED.tsv` was written from the specification of the lines before the audit was run on
them: of each log its rows, `OPERATION BYTES PHASE VERDICT [condition=NAME | missing=A,B]`, `-` for
no phase, and whether damage is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.nccl.audit import audit_paths
from reports.nccl.verdicts import VerdictRow

CORPUS = Path(__file__).parent / "corpus"
TABLE = [one.split("\t") for one in (CORPUS / "EXPECTED.tsv").read_text().splitlines()[1:]]


def shown(row: VerdictRow, wanted: list[str]) -> str:
    """The row in the words of the table, with the detail that the expectation names."""
    words = f"{row.operation} {row.size_bytes} {row.phase or '-'} {row.verdict}"
    detail = next((one[len(words) :] for one in wanted if one.startswith(f"{words} ")), "")
    if detail.startswith(" condition="):
        return f"{words} condition={row.reason.condition.replace(' ', '_')}"
    if detail.startswith(" missing="):
        assert row.reason.condition == ""
        return f"{words} missing={','.join(row.reason.missing)}"
    return words


@pytest.mark.parametrize(("name", "rows", "damaged"), TABLE, ids=[name for name, *_ in TABLE])
def test_verdicts_and_damage_are_those_of_the_specification(name, rows, damaged):
    audit = audit_paths([CORPUS / name])
    wanted = [] if rows == "(no row)" else rows.split("; ")
    assert sorted(shown(row, wanted) for row in audit.rows) == sorted(wanted)
    assert audit.job.unread.damaged > 0 if damaged == "yes" else audit.job.unread.damaged == 0
    assert audit.job.hosts <= {"node1"}, "every line is of the one host that printed it"


def test_every_file_has_its_row():
    assert {name for name, *_ in TABLE} == {one.name for one in CORPUS.iterdir()} - {"EXPECTED.tsv"}


def test_decorations_of_the_files_are_still_there():
    marks = {
        "deco_crlf.txt": b"\r\n",
        "deco_nul.txt": b"\0",
        "deco_ray_ansi.txt": b"\x1b[36m",
        "deco_invalid_utf8.txt": b"\xff\xfe\x80",
        "deco_progress_bar.txt": b"%|#",
    }
    found = {path.name: path.read_bytes() for path in CORPUS.iterdir()}
    assert {name for name, mark in marks.items() if mark not in found[name]} == set()
    assert len({*found.values()}) == len(found)


def test_an_average_is_no_candidate_where_every_version_could_make_it_symmetric():
    [row] = audit_paths([CORPUS / "why_average_2303.txt"]).rows
    assert not [text for text in row.reason.candidates if "average" in text]
