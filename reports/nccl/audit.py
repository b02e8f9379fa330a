"""The whole audit: from paths to rows, with everything that a renderer needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reports.nccl.cells import Replay, replay
from reports.nccl.communicators import GroupKey, View
from reports.nccl.hints import hints
from reports.nccl.job import Job, make_job
from reports.nccl.reading import read_all
from reports.nccl.source import Source, find_sources
from reports.nccl.verdicts import Communicator, Row, rows

Boundaries = Mapping[str, tuple[tuple[int, int], ...]]


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

    rows: tuple[Row, ...]
    job: Job
    made: Replay
    hints: tuple[str, ...]
    boundaries_by: str = ""
    groups: Groups | None = None

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of NCCL, as far as they are known."""
        return tuple(sorted({str(p.versions) for p in self.job.processes.values()}))

    @property
    def registered(self) -> bool:
        """Whether the log shows any registration."""
        return any(row.phase for row in self.rows)


def audit_paths(paths: Sequence[str | Path], *, processes: int = 2) -> Audit:
    """Audit files, folders, pipes and standard input (`-`).

    Raises:
        UsageError: a path that cannot be read.
    """
    sources, remarks = find_sources(paths)
    return audit_sources(sources, remarks, processes=processes)


def audit_sources(
    sources: Sequence[Source],
    remarks: Sequence[str] = (),
    *,
    boundaries: Boundaries | None = None,
    groups: Groups | None = None,
    processes: int = 2,
) -> Audit:
    """Audit streams; `boundaries` and `groups` come from the folder of a run, if there is one."""
    with _no_garbage_collection():
        found = read_all(sources, dict(boundaries or {}), processes=processes)
        job = make_job(sources, found)
    job.remarks[:0] = remarks
    _add_loss_remarks(job)
    made = replay(job)
    own = groups or Groups({}, ())
    found_rows = rows(made, lambda key, views: describe(key, views, job, own))
    by = ""
    if job.iterations_seen is not None:
        by = "marks of the run" if boundaries else "iteration lines, in the order of the file"
    return Audit(tuple(found_rows), job, made, tuple(hints(made, found_rows)), by, groups)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reading makes millions of short-lived objects and no cycles; collecting costs a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _add_loss_remarks(job: Job) -> None:
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


def describe(key: GroupKey, views: list[View], job: Job, groups: Groups) -> Communicator:
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
    return Communicator(label, _role(views, job, groups), ranks, nodes)


def _role(views: list[View], job: Job, groups: Groups) -> str:
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
