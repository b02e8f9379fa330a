"""Whether operations on the same memory are ordered, as a device with streams needs it."""

from __future__ import annotations

from bench.validate.case_evidence import CaseEvidence
from bench.validate.checks.check_verdict import failed, passed
from bench.verdict import CheckVerdict, Finding


def stream_order(evidence: CaseEvidence) -> CheckVerdict | None:
    """No two operations touch the same memory, one of them writing, without an order.

    Of what was recorded on this device, whichever it is: a race need not have happened.
    """
    check = "stream order"
    if evidence.seen[0].races is None:
        return None
    for rank, one in enumerate(evidence.seen):
        if one.races:
            first, *more = one.races
            finding = Finding(
                rank=rank, expected="a wait between them", found=first, evidence=tuple(more[:5])
            )
            return failed(check, finding)
    return passed(check, "no race among all recorded operations")
