"""The whole audit: from paths to rows, with everything that a renderer needs.

`audit_run` audits a run of ours: its logs, its marks between iterations, and its groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.errors import NothingMeasuredError
from bench.store import layout
from bench.store.reading import read_json_object
from reports.nccl.calls import calls_of
from reports.nccl.communicators import GroupKey, View
from reports.nccl.hints import hints
from reports.nccl.inspector import InspectorTimes
from reports.nccl.job import LoggedJob, make_job
from reports.nccl.reader import Marks, Unread, read_source
from reports.nccl.rows import CommunicatorRow, VerdictRow, rows
from reports.nccl.source import find_sources

Role = tuple[str, frozenset[int]]
"""What a group of ranks is for, and its global ranks."""


@dataclass(frozen=True)
class Audit:
    """Rows and what surrounds them. boundaries_by: how iterations are told apart, "" if not.

    ranks, roles: what a run of ours recorded, as of `audit_paths`.
    """

    job: LoggedJob
    boundaries_by: str
    ranks: Mapping[str, int]
    roles: tuple[Role, ...]

    @cached_property
    def rows(self) -> tuple[VerdictRow, ...]:
        """All verdicts."""
        return self.rows_after(0)

    @cached_property
    def hints(self) -> list[str]:
        """What the lines suggest."""
        return hints(self.job, self.rows)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of NCCL, as far as they are known."""
        return tuple(sorted({str(p.versions) for p in self.job.processes.values()}))

    def rows_after(self, iteration: int) -> tuple[VerdictRow, ...]:
        """Rows of what was seen after so many iterations had ended."""
        made = calls_of(self.job, iteration)
        return tuple(rows(made, self._described))

    def _described(self, key: GroupKey, views: list[View]) -> CommunicatorRow:
        """A communicator by its role if the run recorded it, and by its identifiers in any case."""
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
        return CommunicatorRow(label, self._role(views, ranks), ranks, nodes, hosts)

    def _role(self, views: list[View], ranks: int | None) -> str:
        """The recorded groups with exactly these ranks; two roles may share their ranks."""
        members = {self.ranks.get(self.job.processes[v.process].source) for v in views}
        if None in members:
            return ""
        exact = {role for role, own in self.roles if own == members}
        if not exact and ranks is not None:
            # Logs of some ranks are missing: the one kind of group of this size with the others.
            exact = {r for r, own in self.roles if members <= own and len(own) == ranks}
        return "/".join(sorted(exact))


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
    streams = [read_source(one, marks.get(one.name, ()), unread, times) for one in sources]
    job = make_job(streams, unread, times)
    job.remarks[:0] = remarks
    by = "marks of the run" if marks else "iteration lines, in the order of the file"
    seen = job.iterations_seen is not None
    return Audit(job, by if seen else "", ranks or {}, tuple(roles))


_LOG = re.compile(r"rank(\d+)\.log")
# What `bench.worker.nccl_evidence` writes at the end of an iteration.
_MARK = re.compile(r'\{"iteration": (\d{1,18}), "offset_bytes": (\d{1,18})\}')


def audit_run(run: Path) -> Audit:
    """Audit the run in folder `run`; derived from its logs whenever it is asked for.

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
        asked = _at(spec, "measure", "nccl") == "evidence"
        raise NothingMeasuredError(
            "the run was to keep NCCL logs but has none: NCCL wrote nothing"
            if asked
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
    found = set()
    for groups in (one.get("groups") for one in recorded):
        for group in groups if isinstance(groups, list) else ():
            match group:
                case {"role": str(role), "ranks": [*ranks]} if all(type(r) is int for r in ranks):
                    found.add((role, frozenset(ranks)))
    return sorted(found, key=lambda one: (one[0], sorted(one[1])))


def _at(document: dict[str, Any], section: str, key: str) -> Any:
    part = document.get(section)
    return part.get(key) if isinstance(part, dict) else None
