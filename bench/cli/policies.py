"""What is judged, and by which rules, as a verb was told."""

from __future__ import annotations

from pathlib import Path

from bench.derive.metrics import Metric, judged_metrics
from bench.errors import UsageError
from reports.gates.policy import Policy, parse_policy
from sweeps.document import read_document
from sweeps.suggest import did_you_mean


def read_policy(path: Path | None) -> Policy:
    """The policy of a file, or the default one.

    Raises:
        UsageError: the file cannot be read, or is wrong; with lines.
    """
    if path is None:
        return Policy()
    document = read_document(path, "metrics")
    return parse_policy(document.data, document.line, document.source)


def judged_metric(name: str, option: str) -> Metric:
    """The metric of this name.

    Raises:
        UsageError: gates judge none of that name.
    """
    known = judged_metrics()
    if name not in known:
        raise UsageError(
            f"{option}: expected one of {', '.join(known)}, found {name!r}"
            f"{did_you_mean(name, known)}"
        )
    return known[name]
