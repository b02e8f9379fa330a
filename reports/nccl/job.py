"""All processes of the logs that were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from reports.nccl.events import ANY, Choice, Versions, exactly
from reports.nccl.inspector import InspectorTimes
from reports.nccl.reader import StreamReader, Unread
from reports.nccl.timeline import Process

UNKNOWN_PROCESS: Final = "unknown process"
"""Begins the name of what stands for the lines of a device that were pasted without prefix."""
# A process whose name ends in that of a process of so many times its lines is a glued prefix.
_GLUED_RATIO: Final = 50


@dataclass
class LoggedJob:
    """Everything that was read, in an order that does not depend on how processes interleave."""

    unread: Unread
    times: InspectorTimes = field(default_factory=InspectorTimes)
    processes: dict[str, Process] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    bytes_read: int = 0
    iterations_seen: int | None = None

    @property
    def lines(self) -> int:
        """Lines with a NCCL prefix."""
        return sum(process.lines for process in self.processes.values())

    @cached_property
    def symmetric_seen(self) -> bool:
        """A symmetric line proves version and switches, which must be equal on all ranks."""
        facts = (fact for process in self.processes.values() for fact in process.facts())
        return any(isinstance(fact, Choice) and fact.kind == "symmetric" for fact in facts)

    @cached_property
    def hosts(self) -> set[str]:
        """Hosts that printed something."""
        return {process.host for process in self.processes.values()} - {""}


def make_job(streams: Sequence[StreamReader], unread: Unread, times: InspectorTimes) -> LoggedJob:
    """Join the streams in their order, and say what does not fit together."""
    job = LoggedJob(unread, times)
    for stream in streams:
        _drop_glued(stream)
        for _, process in sorted(stream.processes.items()):
            _place(job, process)
        _place_pasted(job, stream)
        job.remarks += stream.problems
        if stream.ras:
            job.remarks.append(
                f"{stream.source}: a report of NCCL RAS (ncclras), which says what ranks answer,"
                " and not which kernel ran"
            )
        job.bytes_read += stream.bytes_read
        if stream.iteration is not None:
            job.iterations_seen = max(job.iterations_seen or 0, stream.iteration)
        _stray_version(job, stream)
    job.processes = dict(sorted(job.processes.items()))
    _settle_versions(job)
    _add_loss_remarks(job)
    return job


def is_unknown(process: str) -> bool:
    """Whether this is no name of one process."""
    return process.startswith(UNKNOWN_PROCESS)


def _place_pasted(job: LoggedJob, stream: StreamReader) -> None:
    stated = {name: own for name, own in stream.pasted.items() if own.items or own.about}
    total = sum(process.lines for process in stated.values())
    if not total:
        return
    lines = f"{total} lines" if total > 1 else "1 line"
    job.remarks.append(
        f"{stream.source}: {lines} without the prefix HOST:PID:TID {'are' if total > 1 else 'is'}"
        " evidence of an unknown process"
    )
    for device, process in stated.items():
        process.name = UNKNOWN_PROCESS + (f" [{device.decode()}]" if device else "")
        process.source, process.device = stream.source, ""
        known = job.processes.setdefault(process.name, process)
        if known is not process:
            known.continue_with(process)


def _drop_glued(stream: StreamReader) -> None:
    """Remove processes whose host is another one's with a piece of a line in front."""
    for name, process in list(stream.processes.items()):
        ends = (stream.processes.get(name[at:]) for at in range(1, len(name)))
        if any(other is not None and process.lines * _GLUED_RATIO < other.lines for other in ends):
            for seen in stream.processes.pop(name).observations():
                for line in filter(None, (seen.line, seen.call_line)):
                    stream.unread.add_damaged(line.encode(), stream.iteration or 0, 0)
            stream.unread.damaged += process.lines


def _place(job: LoggedJob, process: Process) -> None:
    known = job.processes.get(process.name)
    if known is None:
        job.processes[process.name] = process
    elif _is_copy(known, process):
        job.remarks.append(
            f"{process.source}: {process.name} is in {known.source} too and was counted once"
        )
        if process.lines > known.lines:
            job.processes[process.name] = process
    elif _begins_anew(known, process):
        process.name = f"{process.name} in {process.source}"
        job.processes[process.name] = process
    else:
        known.continue_with(process)


def _ranks(process: Process) -> dict[str | None, str | None]:
    """Rank by communicator id, as the INIT lines say."""
    named = [event.values for event in process.events("init") if event.values[4]]
    return {values[4]: values[1] for values in reversed(named)}


def _is_copy(first: Process, other: Process) -> bool:
    mine, theirs = _ranks(first), _ranks(other)
    shared = mine.keys() & theirs.keys()
    if shared:
        return all(mine[comm] == theirs[comm] for comm in shared)
    return first.lines == other.lines and first.items == other.items


def _begins_anew(first: Process, other: Process) -> bool:
    """Whether two streams with the same host and process id are two processes (containers)."""
    if _ranks(first) and _ranks(other):
        return True
    return all(any(process.events("version")) for process in (first, other))


def _stray_version(job: LoggedJob, stream: StreamReader) -> None:
    """A bare version line speaks for the processes of its stream that state none themselves."""
    events = list(stream.stray.events("version"))
    if len(events) > 1:
        shown = ", ".join(sorted(str(event.values[0]) for event in events))
        job.remarks.append(f"{stream.source}: version lines of several versions: {shown}")
    for process in job.processes.values() if len(events) == 1 else ():
        if process.source == stream.source and not any(process.events("version")):
            process.describe(events[0])


def _settle_versions(job: LoggedJob) -> None:
    """Exact versions where lines state them; else what the forms of lines leave possible."""
    stated: dict[Versions, str] = {}
    for process in job.processes.values():
        lines = ((exactly(line.values[0] or ""), line.text) for line in process.events("version"))
        for versions, text in lines:
            if versions is not None and not process.version_line:
                process.versions, process.version_line = versions, text
                stated.setdefault(versions, text)
    if len(stated) > 1:
        shown = ", ".join(sorted(map(str, stated)))
        job.remarks.append(f"the processes state different versions of NCCL: {shown}")
    common: Versions | None = next(iter(stated)) if len(stated) == 1 else ANY
    forms = {name: _forms(process) for name, process in job.processes.items()}
    for form in forms.values():
        common = None if common is None else common.intersection(form)
    for name, process in job.processes.items():
        if process.version_line:
            if process.versions.intersection(forms[name]) is None:
                job.remarks.append(
                    f"{name} states version {process.versions}, which does not print lines of its"
                    " forms: a fork, or another library than the one that states it"
                )
            continue
        process.versions = forms[name] if common is None else common
        if len(stated) == 1 and common is not None:
            process.version_line = next(iter(stated.values()))


def _forms(process: Process) -> Versions:
    """Versions that print all of the TUNING lines of the process."""
    common: Versions | None = ANY
    for fact in process.facts():
        if common is not None and isinstance(fact, Choice):
            common = common.intersection(fact.versions)
    return ANY if common is None else common


def _add_loss_remarks(job: LoggedJob) -> None:
    lost = sum(process.deduplicated for process in job.processes.values())
    if lost:
        job.remarks.append(
            f"the collector left out repeated lines ({lost} by its own count), so counts are lower"
            " bounds and whole processes may be missing; Ray keeps them with RAY_DEDUP_LOGS=0"
        )
    dropped = sum(process.dropped for process in job.processes.values())
    if dropped:
        job.remarks.append(
            f"{dropped} state changes, TUNING and COLL lines beyond the limits were not kept"
        )
    if job.times.left_out:
        job.remarks.append(
            f"{job.times.left_out} records of more kinds of NCCL Inspector were not kept"
        )
