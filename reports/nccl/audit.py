"""The whole audit: from paths to rows, with everything that a renderer needs.

`audit_run` audits a run of ours: its logs, its marks between iterations, and its groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reports.nccl.calls import Calls, calls_of
from reports.nccl.communicators import GroupKey, View
from reports.nccl.hints import hints
from reports.nccl.job import LoggedJob, make_job
from reports.nccl.reader import Marks, read_source
from reports.nccl.rows import CommunicatorRow, VerdictRow, narrowed, rows
from reports.nccl.source import LogSource, find_sources


@dataclass(frozen=True)
class Groups:
    """What a run of ours recorded: the rank behind each log, and the groups with their roles.

    ranks: global rank by source name. roles: (role, global ranks) of every group.
    """

    ranks: Mapping[str, int]
    roles: tuple[tuple[str, frozenset[int]], ...]


@dataclass(frozen=True)
class Audit:
    """Rows and what surrounds them. boundaries_by: how iterations are told apart, "" if not."""

    rows: tuple[VerdictRow, ...]
    job: LoggedJob
    made: Calls
    hints: tuple[str, ...]
    boundaries_by: str = ""
    groups: Groups | None = None

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of NCCL, as far as they are known."""
        return tuple(sorted({str(p.versions) for p in self.job.processes.values()}))

    def rows_after(self, iteration: int) -> list[VerdictRow]:
        """Rows of what was seen after so many iterations had ended."""
        made = narrowed(self.made, iteration) if iteration else self.made
        groups = self.groups or Groups({}, ())
        return rows(made, lambda key, views: describe(key, views, self.job, groups))


def audit_paths(paths: Sequence[str | Path]) -> Audit:
    """Audit files, folders, pipes and standard input (`-`).

    Raises:
        UsageError: a path that cannot be read.
    """
    return audit_sources(*find_sources(paths))


def audit_sources(
    sources: Sequence[LogSource],
    remarks: Sequence[str] = (),
    *,
    boundaries: Mapping[str, Marks] | None = None,
    groups: Groups | None = None,
) -> Audit:
    """Audit streams; `boundaries` and `groups` come from the folder of a run, if there is one."""
    marks = boundaries or {}
    job = make_job(sources, [read_source(one, marks.get(one.name, ())) for one in sources])
    job.remarks[:0] = remarks
    _add_loss_remarks(job)
    audit = Audit((), job, calls_of(job), (), groups=groups)
    found = tuple(audit.rows_after(0))
    by = ""
    if job.iterations_seen is not None:
        by = "marks of the run" if boundaries else "iteration lines, in the order of the file"
    return replace(audit, rows=found, hints=tuple(hints(job, found)), boundaries_by=by)


def _add_loss_remarks(job: LoggedJob) -> None:
    lost = sum(process.timeline.deduplicated for process in job.processes.values())
    if lost:
        job.remarks.append(
            f"the collector left out repeated lines ({lost} by its own count), so counts are lower"
            " bounds and whole processes may be missing; Ray keeps them with RAY_DEDUP_LOGS=0"
        )
    dropped = sum(process.timeline.dropped for process in job.processes.values())
    if dropped:
        job.remarks.append(
            f"{dropped} state changes or distinct observations beyond the limits were not kept"
        )


def describe(key: GroupKey, views: list[View], job: LoggedJob, groups: Groups) -> CommunicatorRow:
    """Name of a communicator: its role if the run recorded it, its identifiers in any case."""
    first = min(views, key=lambda view: (view.process, view.pointer))
    ranks = next((view.ranks for view in views if view.ranks), None)
    nodes = next((view.nodes for view in views if view.nodes is not None), None)
    if key[0] == "id":
        label = f"commId {key[1]}"
    elif key[0] == "split" and first.split is not None:
        label = f"split {first.split[1]} of {first.split[0].pointer}, colour {first.split[2]}"
    else:
        label = f"{first.pointer} of {first.process}"
        if first.begins:
            label += f" ({first.begins + 1}. with this pointer)"
    hosts = tuple(sorted({view.process.rpartition(":")[0] for view in views}))
    return CommunicatorRow(label, _role(views, job, groups), ranks, nodes, hosts)


def _role(views: list[View], job: LoggedJob, groups: Groups) -> str:
    """The recorded groups with exactly these ranks; two roles may share their ranks."""
    members = set()
    for view in views:
        rank = groups.ranks.get(job.processes[view.process].source)
        if rank is None:
            return ""
        members.add(rank)
    ranks = next((view.ranks for view in views if view.ranks), None)
    exact = {role for role, own in groups.roles if own == members}
    if not exact and ranks is not None:
        # Logs of some ranks are missing: the one kind of group of this size that holds the others.
        exact = {r for r, own in groups.roles if members <= own and len(own) == ranks}
    return "/".join(sorted(exact))


FOLDER = "nccl"


@dataclass(frozen=True)
class RunAudit:
    """`audit` of a run, or None and in words why there is none."""

    audit: Audit | None
    text: str = ""


def audit_run(run: Path) -> RunAudit:
    """Audit the run in folder `run`; derived from its logs whenever it is asked for."""
    spec = _object(run / "spec.json")
    device = _at(spec, "launch", "device")
    if device == "cpu":
        return RunAudit(
            None,
            "there is no NCCL in this run: its ranks are CPU processes and communicate by gloo",
        )
    folder = run / FOLDER
    logs = sorted(folder.glob("rank*.log"))
    if not logs:
        if _at(spec, "measure", "nccl") == "evidence":
            return RunAudit(None, "the run was to keep NCCL logs but has none: NCCL wrote nothing")
        return RunAudit(
            None, "the run kept no NCCL logs; measure.nccl: evidence makes a run that does"
        )
    sources, remarks = find_sources(list(logs))
    ranks = {source.name: _rank(Path(source.name)) for source in sources}
    boundaries = {
        source.name: _boundaries(folder / f"iterations.rank{ranks[source.name]}.jsonl")
        for source in sources
    }
    boundaries = {name: marks for name, marks in boundaries.items() if marks}
    groups = Groups(ranks, _roles(folder))
    return RunAudit(audit_sources(sources, remarks, boundaries=boundaries or None, groups=groups))


def _rank(path: Path) -> int:
    digits = path.stem.removeprefix("rank")
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def _boundaries(path: Path) -> Marks:
    """(offset in the NCCL log, iterations ended) as the rank noted them; damaged lines are left."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    for line in lines:
        try:
            mark = json.loads(line)
            found.append((int(mark["offset_bytes"]), int(mark["iteration"])))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(sorted(found))


def _roles(folder: Path) -> tuple[tuple[str, frozenset[int]], ...]:
    """Groups that any rank recorded."""
    found: set[tuple[str, frozenset[int]]] = set()
    for path in sorted(folder.glob("groups.rank*.json")):
        groups = _object(path).get("groups", [])
        for group in groups if isinstance(groups, list) else []:
            try:
                found.add((str(group["role"]), frozenset(map(int, group["ranks"]))))
            except (KeyError, TypeError, ValueError):
                continue
    return tuple(sorted(found, key=lambda one: (one[0], sorted(one[1]))))


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _at(document: dict[str, Any], section: str, key: str) -> Any:
    part = document.get(section)
    return part.get(key) if isinstance(part, dict) else None
