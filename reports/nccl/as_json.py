"""The audit as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from reports.nccl.audit import Audit
from reports.nccl.presentation import bytes_by_verdict
from reports.nccl.requirement import Result
from reports.nccl.verdicts import Row

FORMAT_VERSION: Final = 1


def to_data(audit: Audit, results: Sequence[Result] = ()) -> dict[str, Any]:
    """Everything, ready for `json.dumps`."""
    unread, job = audit.job.unread, audit.job
    return {
        "format": FORMAT_VERSION,
        "nccl_versions": list(audit.versions),
        "processes": len(job.processes),
        "hosts": len(job.hosts),
        "nccl_lines": job.lines,
        "bytes_read": job.bytes_read,
        "iterations": {"seen": job.iterations_seen, "by": audit.boundaries_by or None},
        "rows": [_row(row) for row in audit.rows],
        "bytes_by_verdict": {
            name: {str(verdict): size for verdict, size in own.items()}
            for name, own in sorted(bytes_by_verdict(audit).items())
        },
        "hints": list(audit.hints),
        "requirements": [_result(one) for one in results],
        "requirements_met": all(one.state == "met" for one in results) if results else None,
        "not_understood": {
            "lines": unread.unknown_lines,
            "damaged": unread.damaged,
            "overlong": unread.overlong,
            "ignored": unread.ignored,
            "forms": [
                {"count": count, "example": unread.examples.get(shape, shape)}
                for shape, count in unread.unknown.most_common(20)
            ],
            "damaged_examples": list(unread.damaged_examples),
        },
        "remarks": list(job.remarks),
    }


def _row(row: Row) -> dict[str, Any]:
    one, reason = row.communicator, row.reason
    return {
        "communicator": one.label,
        "communicator_known": one.attributed,
        "role": one.role or None,
        "ranks": one.ranks,
        "nodes": one.nodes,
        "operation": row.operation,
        "bytes": row.size_bytes,
        "bytes_are": row.bytes_are,
        "phase": row.phase or None,
        "verdict": str(row.verdict),
        "calls": {str(verdict): count for verdict, count in row.calls.items()},
        "calls_are_at_least": row.at_least,
        "bytes_by_verdict": {str(v): size for v, size in row.bytes_by_verdict.items()},
        "lines": row.lines,
        "kernels": list(row.kernels),
        "printed_by": list(row.processes),
        "line": row.quote or None,
        "reason": None
        if reason is None
        else {
            "condition": reason.condition or None,
            "text": reason.text,
            "line": reason.quote or None,
            "candidates": list(reason.candidates),
            "missing": list(reason.missing),
            "settled_by": reason.settled_by or None,
        },
        "remarks": list(row.remarks),
    }


def _result(one: Result) -> dict[str, Any]:
    return {
        "requirement": one.requirement.text,
        "operation": one.requirement.operation,
        "state": one.state,
        "message": one.message,
        "failing_rows": len(one.failing),
    }
