"""All processes of the logs that were read, each with one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from reports.nccl.model import ANY, Observation, StateChange, Unread, Versions, exactly
from reports.nccl.reader import StreamReader
from reports.nccl.source import LogSource
from reports.nccl.timeline import Timeline

# Of lines that were pasted without their prefix.
UNKNOWN_PROCESS: Final = "unknown process"
# A process whose name ends in that of a process of so many times its lines is a glued prefix.
_GLUED_RATIO: Final = 50


@dataclass
class Process:
    """One process of the job. source: the stream where it was seen first.

    version_line: the line that states the version, "" if none does; `versions` then come from the
    forms of its lines alone.
    """

    name: str
    timeline: Timeline
    source: str
    versions: Versions = ANY
    version_line: str = ""

    @property
    def host(self) -> str:
        """Where it ran, "" if it is not known."""
        return self.name.rpartition(":")[0]

    @property
    def label(self) -> str:
        """Name with the local device, which is no rank."""
        return f"{self.name} [{self.timeline.device}]" if self.timeline.device else self.name

    def observations(self) -> list[Observation]:
        """All distinct observations, those of each stretch between two state changes."""
        return [one for tally in self.timeline.tallies() for one in tally]

    def about(self, kind: str) -> list[StateChange]:
        """Lines of this kind about the process as a whole."""
        return [e for (k, _), e in self.timeline.about.items() if k == kind]


@dataclass
class LoggedJob:
    """Everything that was read, in an order that does not depend on how processes interleave."""

    processes: dict[str, Process]
    unread: Unread = field(default_factory=Unread)
    remarks: list[str] = field(default_factory=list)
    bytes_read: int = 0
    iterations_seen: int | None = None

    @property
    def lines(self) -> int:
        """Lines with a NCCL prefix."""
        return sum(process.timeline.lines for process in self.processes.values())

    @cached_property
    def hosts(self) -> set[str]:
        """Hosts that printed something."""
        return {process.host for process in self.processes.values()} - {""}


def make_job(sources: Sequence[LogSource], found: Sequence[StreamReader]) -> LoggedJob:
    """Join the streams in their order, and say what does not fit together."""
    job = LoggedJob({})
    for source, one in zip(sources, found, strict=True):
        _drop_glued(one)
        for key, timeline in sorted(one.timelines.items()):
            _place(job, key.decode("ascii", "replace"), timeline, source.name)
        _place_pasted(job, one.pasted, source.name)
        job.unread.add(one.unread)
        job.remarks += one.problems
        job.bytes_read += one.bytes_read
        if one.iteration is not None:
            job.iterations_seen = max(job.iterations_seen or 0, one.iteration)
        _stray_version(job, one, source.name)
    job.processes = dict(sorted(job.processes.items()))
    _settle_versions(job)
    return job


def _place_pasted(job: LoggedJob, timeline: Timeline, source: str) -> None:
    if not timeline.lines:
        return
    lines = f"{timeline.lines} lines" if timeline.lines > 1 else "1 line"
    verb = "are" if timeline.lines > 1 else "is"
    job.remarks.append(
        f"{source}: {lines} without the prefix HOST:PID:TID {verb} evidence of an unknown process"
    )
    known = job.processes.setdefault(UNKNOWN_PROCESS, Process(UNKNOWN_PROCESS, timeline, source))
    if known.timeline is not timeline:
        known.timeline.continue_with(timeline)


def _drop_glued(found: StreamReader) -> None:
    """Remove processes whose host is another one's with a piece of a line in front."""
    by_pid: dict[bytes, list[bytes]] = {}
    for key in found.timelines:
        by_pid.setdefault(key.rpartition(b":")[2], []).append(key)
    for keys in by_pid.values():
        for long in keys if len(keys) > 1 else ():
            for short in keys:
                if (
                    long != short
                    and long.endswith(short)
                    and long in found.timelines
                    and found.timelines[long].lines * _GLUED_RATIO < found.timelines[short].lines
                ):
                    found.unread.damaged += found.timelines.pop(long).lines


def _place(job: LoggedJob, name: str, timeline: Timeline, source: str) -> None:
    known = job.processes.get(name)
    if known is None:
        job.processes[name] = Process(name, timeline, source)
    elif _is_copy(known.timeline, timeline):
        job.remarks.append(f"{source}: {name} is in {known.source} too and was counted once")
        if timeline.lines > known.timeline.lines:
            job.processes[name] = Process(name, timeline, source)
    elif _begins_anew(known.timeline, timeline):
        job.processes[f"{name} in {source}"] = Process(f"{name} in {source}", timeline, source)
    else:
        known.timeline.continue_with(timeline)


def _ranks(timeline: Timeline) -> dict[str | None, str | None]:
    """Rank by communicator id, as the INIT lines say."""
    named = [event.values for event in timeline.events("init") if event.values[4]]
    return {values[4]: values[1] for values in reversed(named)}


def _is_copy(one: Timeline, other: Timeline) -> bool:
    mine, theirs = _ranks(one), _ranks(other)
    shared = mine.keys() & theirs.keys()
    if shared:
        return all(mine[comm] == theirs[comm] for comm in shared)
    return one.lines == other.lines and one.items == other.items


def _begins_anew(one: Timeline, other: Timeline) -> bool:
    """Whether two streams with the same host and process id are two processes (containers)."""
    if _ranks(one) and _ranks(other):
        return True
    return all(any(k == "version" for k, _ in timeline.about) for timeline in (one, other))


def _stray_version(job: LoggedJob, found: StreamReader, source: str) -> None:
    """A bare version line speaks for the processes of its stream that state none themselves."""
    events = [e for (kind, _), e in found.stray.about.items() if kind == "version"]
    versions = {event.values[0] for event in events}
    if len(versions) != 1:
        if versions:
            shown = ", ".join(sorted(str(v) for v in versions))
            job.remarks.append(f"{source}: version lines of several versions: {shown}")
        return
    for process in job.processes.values():
        if process.source == source and not process.about("version"):
            process.timeline.describe(events[0])


def _settle_versions(job: LoggedJob) -> None:
    """Exact versions where lines state them; else what the forms of lines leave possible."""
    stated: dict[Versions, str] = {}
    for process in job.processes.values():
        for event in process.about("version"):
            versions = exactly(event.values[0] or "")
            if versions is not None:
                process.versions, process.version_line = versions, event.text
                stated.setdefault(versions, event.text)
                break
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
    for observation in process.observations():
        if common is not None and observation.choice is not None:
            common = common.intersection(observation.choice.versions)
    return ANY if common is None else common
