"""Coverage-guided fuzzing of the grammar: a script, with `atheris` installed beside the project.

    python -m benchmarks.nccl_fuzzing -max_total_time=180 [CORPUS_FOLDER]

Every input is read as a log. An exception is a finding, and so is a row without a line of the input
that proves it. Arguments are those of libFuzzer.
"""

from __future__ import annotations

import sys
from typing import Any

from reports.nccl.job import GroupKey, Job, View, make_job
from reports.nccl.reading import Found
from reports.nccl.replay import replay
from reports.nccl.rows import Communicator, Verdict, rows
from reports.nccl.scan import Scan
from reports.nccl.source import Source, whole_lines


def audit_bytes(data: bytes) -> Job:
    """Read `data` as a log, and check what comes out.

    Raises:
        ValueError: a verdict that no line of `data` states.
    """
    scan = Scan()
    found = Found(scan.timelines, scan.stray, unread=scan.unread)
    for block in whole_lines([data], lambda: None):
        scan.feed(block)
    scan.finish()
    for timeline in found.timelines.values():
        timeline.drain()
    job = make_job([Source("fuzz", None, None, "")], [found])
    for row in rows(replay(job), _name):
        if row.verdict is not Verdict.NO_EVIDENCE and " Bytes -> " not in row.quote:
            raise ValueError(f"a verdict from nothing: {row}")
    return job


def _name(_key: GroupKey, _views: list[View]) -> Communicator:
    return Communicator("fuzz")


def main(arguments: list[str]) -> int:
    """Run until libFuzzer is told to stop, or finds something."""
    try:
        import importlib

        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        sys.stderr.write("fuzzing needs the package atheris: pip install atheris\n")
        return 2
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], audit_bytes)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
