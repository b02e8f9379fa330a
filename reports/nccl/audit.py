"""The whole audit: from paths to rows, with everything that a renderer needs.

`audit_run` audits a run of ours: its logs, its marks between iterations, and its groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import NothingMeasuredError
from bench.store import layout
from bench.store.reading import read_json_object
from reports.nccl.inspector import InspectorTimes
from reports.nccl.job import make_job
from reports.nccl.reader import Marks, Unread, read_source
from reports.nccl.source import find_sources
from reports.nccl.verdicts import Audit, Role


def audit_paths(
    paths: Sequence[str | Path],
    marks: Mapping[str, Marks] | None = None,
    ranks: Mapping[str, int] | None = None,
    roles: Sequence[Role] = (),
) -> Audit:
    """Audit files, folders, pipes and standard input (`-`).

    Args:
        paths: what to read.
        marks: by name of a source, where iterations end in it, as a run of ours noted them.
        ranks: by name of a source, the global rank that wrote it.
        roles: of all groups of a run of ours.

    Raises:
        UsageError: a path that cannot be read.
    """
    sources, remarks = find_sources(paths)
    unread, times, marks = Unread(), InspectorTimes(), marks or {}
    streams = [read_source(source, marks.get(source.name, ()), unread, times) for source in sources]
    job = make_job(streams, unread, times)
    job.remarks[:0] = remarks
    by = "marks of the run" if marks else "iteration lines, in the order of the file"
    seen = job.iterations_seen is not None
    return Audit(job, by if seen else "", ranks or {}, tuple(roles))


_LOG = re.compile(r"rank(\d+)\.log")
# What `bench.worker.nccl_evidence` writes at the end of an iteration.
_MARK = re.compile(r'\{"iteration": (\d{1,18}), "offset_bytes": (\d{1,18})\}')


def audit_run(run: Path) -> Audit:
    """Audit the run in folder `run`; derived from its logs whenever it is requested.

    Raises:
        NothingMeasuredError: it has no log of NCCL, and why.
    """
    spec = read_json_object(run / layout.SPEC, []) or {}
    if _at(spec, "launch", "device") == "cpu":
        raise NothingMeasuredError(
            "there is no NCCL in this run: its ranks are CPU processes and communicate by gloo"
        )
    folder = run / layout.NCCL
    logs = ((log, _LOG.fullmatch(log.name)) for log in sorted(folder.glob("rank*.log")))
    ranks = {str(log): int(name[1]) for log, name in logs if name}
    if not ranks:
        wanted = _at(spec, "measure", "nccl") == "evidence"
        raise NothingMeasuredError(
            "the run was to keep NCCL logs but has none: NCCL wrote nothing"
            if wanted
            else "the run kept no NCCL logs; measure.nccl: evidence makes a run that does"
        )
    marks = {name: _marks(folder / f"iterations.rank{rank}.jsonl") for name, rank in ranks.items()}
    return audit_paths(list(ranks), marks if any(marks.values()) else {}, ranks, _roles(folder))


def _marks(path: Path) -> Marks:
    """(offset in the NCCL log, iterations ended) as the rank noted them."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return tuple(sorted((int(offset), int(ended)) for ended, offset in _MARK.findall(text)))


def _roles(folder: Path) -> list[Role]:
    """Groups that any rank recorded; damaged ones are left out."""
    recorded = (read_json_object(path, []) or {} for path in folder.glob("groups.rank*.json"))
    roles = set()
    for groups in (document.get("groups") for document in recorded):
        for group in groups if isinstance(groups, list) else ():
            match group:
                case {"role": str(role), "ranks": [*ranks]} if all(type(r) is int for r in ranks):
                    roles.add((role, frozenset(ranks)))
    return sorted(roles, key=lambda role: (role[0], sorted(role[1])))


def _at(document: dict[str, Any], section: str, key: str) -> Any:
    part = document.get(section)
    return part.get(key) if isinstance(part, dict) else None
