"""The 13 lines of Megatron-LM pull request 3067, argued as far as they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.nccl.audit import audit_paths
from reports.nccl.presentation import audit_blocks
from reports.nccl.verdicts import Verdict, judge, parse_requirements
from reports.renderers.render import render

LOG = Path(__file__).parent / "pr3067.log"


@pytest.fixture(scope="module")
def audit():
    return audit_paths([LOG])


def test_every_gather_is_symmetric_and_every_scatter_regular_and_no_rank_is_blamed(audit):
    assert audit.versions == ("2.27.3 to 2.27.7",)
    assert not any(row.communicator.attributed for row in audit.rows)
    row = next(row for row in audit.rows if row.size_bytes == 131473408)
    assert (row.lines, dict(row.calls), row.at_least) == (2, {Verdict.SYMMETRIC: 1}, True)
    text = render(audit_blocks(audit))
    for words in ("6 processes on 1 host;", "! not symmetric", "local CUDA device, not a rank"):
        assert words in text
    assert "failed or not met" not in text
    verdicts = {(row.operation, row.verdict) for row in audit.rows}
    assert verdicts == {
        ("AllGather", Verdict.SYMMETRIC),
        ("ReduceScatter", Verdict.REGULAR),
        ("AllReduce", Verdict.REGULAR),
    }
    assert len(audit.rows) == 8


def test_coll_and_reg_would_settle_the_scatters_and_nodes_are_not_the_reason(audit):
    reasons = [row.reason for row in audit.rows if row.operation == "ReduceScatter"]
    assert {reason.condition for reason in reasons} == {""}
    assert {reason.missing for reason in reasons} == {("COLL", "REG")}
    assert all("nodes are not the reason" in reason.text for reason in reasons)
    candidates = " ".join(reasons[0].candidates)
    assert all(word in candidates for word in ("average", "scaled sum", "grouped", "outside"))


def test_the_reviewers_requirement_fails(audit):
    wanted = parse_requirements("AG=sym,RS=sym")
    states = [one.state for one in judge(audit, wanted)]
    assert states == ["met", "not met"]
    after = [one.state for one in judge(audit, wanted, after_iteration=1)]
    assert after == ["no evidence", "no evidence"]


def test_markdown_escapes_what_a_log_can_hold(tmp_path):
    log = tmp_path / "log"
    log.write_text("n:1:2 [0] NCCL INFO <script>|x| `boo`\n" + LOG.read_text())
    text = render(audit_blocks(audit_paths([log])), "md")
    assert "<script>" not in text
    assert "&#124;x&#124;" in text


@pytest.mark.parametrize(("least", "rows"), [(0, 5), (4096, 5), (4097, 4)])
def test_smaller_messages_than_asked_for_do_not_count(audit, least, rows):
    scattered, reduced = judge(audit, parse_requirements("RS=sym,AR=sym"), min_bytes=least)
    assert len(scattered.failing) == rows
    assert reduced.state == ("no evidence" if least else "not met")
    assert not least or reduced.message == f"the log shows no AllReduce of {least:,} bytes or more"
