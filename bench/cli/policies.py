"""The policy that a verb was given."""

from __future__ import annotations

from pathlib import Path

from reports.gates.policy import Policy, parse_policy
from sweeps.document import read_document


def read_policy(path: Path | None) -> Policy:
    """The policy of a file, or the default one.

    Raises:
        UsageError: the file cannot be read, or is wrong; with lines.
    """
    if path is None:
        return Policy()
    document = read_document(path)
    return parse_policy(document.data, document.line, document.source)
