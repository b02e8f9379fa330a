"""Waiting for the ranks: until they end by themselves, hang, run out of time, or are stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.launch.ending import Ending
from bench.launch.protocol import Job, Symptoms
from bench.spec import LaunchSpec
from bench.store.samples import GLOB, lines_by_rank


class Heartbeat:
    """Counts each rank's steps by its lines. One stat per file and call; a read only on a change.

    Until the first step a file that was written to is a sign of life too: ranks touch it while they
    draw initial values.

    Args:
        folder: of the run; its sample files need not exist yet.
        ranks: of the run.
        now_seconds: a monotonic clock's reading at the start.

    steps: that each rank has finished. grown_seconds: when each has added its last line.
    """

    def __init__(self, folder: Path, ranks: int, now_seconds: float) -> None:
        self.folder = folder
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._read_bytes: dict[Path, int] = {}
        self.steps = [0] * ranks
        self.grown_seconds = [now_seconds] * ranks
        self.start_seconds = self.last_growth_seconds = now_seconds

    def poll(self, now_seconds: float) -> None:
        """Look at the files; remembers `now_seconds` for those ranks that have added lines."""
        for file in self.folder.glob(GLOB):
            with contextlib.suppress(OSError):
                state = file.stat()
                stamp = (state.st_mtime_ns, state.st_size)
                if self._stamps.get(file) == stamp:
                    continue
                lines = lines_by_rank(self._new_lines(file))
                self._stamps[file] = stamp
                if not any(self.steps):
                    self.last_growth_seconds = now_seconds
                for rank in lines.keys() & range(len(self.steps)):
                    self.steps[rank] += lines[rank]
                    self.grown_seconds[rank] = self.last_growth_seconds = now_seconds

    def _new_lines(self, file: Path) -> bytes:
        """Whole lines that were added since the last look."""
        known = self._read_bytes.get(file, 0)
        with file.open("rb") as stream:
            stream.seek(known)
            added = stream.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._read_bytes[file] = known + len(complete)
        return complete

    def rank_behind(self) -> int | None:
        """The one rank with fewer steps than every other, None if there is no such rank."""
        fewest = min(self.steps)
        behind = [rank for rank, count in enumerate(self.steps) if count == fewest]
        return behind[0] if len(behind) == 1 and len(self.steps) > 1 else None


_STACK_SECONDS = 0.5
_RANKS_SHOWN = 8
_STUCK_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """Times of the launcher, in seconds.

    tick: how often it looks at the step files and at `stop`; between two looks it sleeps in the
    kernel. startup_allowance: added to `hang_seconds` for the first step, in which ranks import
    torch, read data and find each other. grace: between SIGTERM and SIGKILL. late: until files
    that another machine wrote are seen here.
    """

    tick_seconds: float = 0.5
    startup_allowance_seconds: float = 120.0
    grace_seconds: float = 3.0
    late_seconds: float = 60.0


class StopRequest(threading.Event):
    """A request to end a run, with its reason."""

    why = "stopped on request"


@dataclass(frozen=True)
class Watch:
    """Watches one job."""

    job: Job
    heartbeat: Heartbeat
    launch: LaunchSpec
    limits: Limits

    def wait(self, stop: threading.Event, on_step: Callable[[int], None] | None) -> Ending | None:
        """Block until the job has ended by itself (None), or must be ended (why)."""
        reported = 0
        while True:
            job = self.job.wait(self.limits.tick_seconds)
            now = time.monotonic()
            self.heartbeat.poll(now)
            if on_step is not None and (finished := min(self.heartbeat.steps)) > reported:
                reported = finished
                on_step(reported)
            if job.phase == "ended" and (job.exit_code == 0 or not stop.is_set()):
                return None
            ending = self._reason_to_end(now, stop)
            if ending is not None:
                return ending

    def _reason_to_end(self, now: float, stop: threading.Event) -> Ending | None:
        if stop.is_set():
            why = stop.why if isinstance(stop, StopRequest) else StopRequest.why
            return Ending("interrupted", f"{why} {self._progress()}")
        if not self.heartbeat.folder.is_dir():
            return Ending("crashed", "the folder of the run was removed while it was going on")
        if now - self.heartbeat.start_seconds > self.launch.timeout_seconds:
            limit = self.launch.timeout_seconds
            silent_seconds = now - self.heartbeat.last_growth_seconds
            return Ending(
                "timeout",
                f"not finished within launch.timeout_seconds = {limit:g} {self._progress()};"
                f" {self._circumstances(self.job.symptoms(), now)}",
                # Ranks that still step are a step apart by chance.
                self.heartbeat.rank_behind() if silent_seconds > _STUCK_SECONDS else None,
            )
        allowed = self.launch.hang_seconds
        if not any(self.heartbeat.steps):
            allowed += self.limits.startup_allowance_seconds
        if now - self.heartbeat.last_growth_seconds > allowed:
            return self._hang(allowed, now)
        return None

    def _hang(self, allowed_seconds: float, now: float) -> Ending:
        """Name the process that holds up the others, if the evidence shows one."""
        seen = self.job.symptoms()
        rank, evidence = self._suspect(seen)
        circumstances = self._circumstances(seen, now)
        self.job.ask_for_stacks()
        time.sleep(_STACK_SECONDS)
        return Ending(
            "hang",
            f"no rank finished a step for {allowed_seconds:g} s {self._progress()}; {evidence}"
            f"{circumstances}; stacks are in logs/rank<N>.log",
            rank,
        )

    def _suspect(self, seen: Symptoms) -> tuple[int | None, str]:
        """The rank to name, None where it is none of them, and what speaks against it."""
        stopped = [rank for rank, state in sorted(seen.ranks.items()) if state == "stopped"]
        if stopped:
            return stopped[0], f"rank {', '.join(map(str, stopped))} is stopped (SIGSTOP); "
        if seen.agent == "stopped":
            return None, "the process that starts the ranks is stopped (SIGSTOP); "
        behind = self.heartbeat.rank_behind()
        if behind is not None:
            return behind, f"rank {behind} is behind the others; "
        return None, ""

    def _circumstances(self, seen: Symptoms, now: float) -> str:
        """Tells a starved machine from a stuck rank."""
        silent = [now - grown for grown in self.heartbeat.grown_seconds]
        many, shown = len(silent) > _RANKS_SHOWN, range(len(silent))
        longest = sorted(shown, key=lambda rank: -silent[rank])[:_RANKS_SHOWN]
        ranks = ", ".join(
            f"rank {rank} {seen.ranks.get(rank, 'gone')}, last line {silent[rank]:.0f} s ago"
            for rank in (longest if many else shown)
        )
        more = f", {len(silent) - _RANKS_SHOWN} more ranks" if many else ""
        return f"{ranks}{more}" + (f"; {seen.load}" if seen.load else "")

    def _progress(self) -> str:
        steps = self.heartbeat.steps
        if not any(steps):
            return "(before the first step)"
        if len(set(steps)) == 1:
            return f"(after step {steps[0]})"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
        return f"(steps finished by {counts})"
