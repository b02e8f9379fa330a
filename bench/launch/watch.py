"""Waiting for the ranks: until they end by themselves, hang, run out of time, or are stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.launch.outcome import Outcome
from bench.launch.protocol import Job, Symptoms
from bench.spec import LaunchSpec
from bench.store.samples import GLOB, lines_by_rank


class Heartbeat:
    """Counts each rank's steps by its lines. One stat per file and call; a read only on growth.

    Until the first step a file that was written to is a sign of life too: ranks touch it while they
    draw initial values.

    Args:
        folder: of the run; its sample files need not exist yet.
        ranks: of the run.
        now_seconds: a monotonic clock's reading at the start.

    steps: that each rank has finished.
    """

    def __init__(self, folder: Path, ranks: int, now_seconds: float) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self._touched: dict[Path, int] = {}
        self.steps = [0] * ranks
        self._grown_seconds = [now_seconds] * ranks
        self.last_growth_seconds = now_seconds

    def poll(self, now_seconds: float) -> None:
        """Look at the files; remembers `now_seconds` for those ranks that have added lines."""
        for file in self._folder.glob(GLOB):
            if not any(self.steps) and self._was_touched(file):
                self.last_growth_seconds = now_seconds
            for rank, lines in lines_by_rank(self._new_lines(file)).items():
                if lines and rank < len(self.steps):
                    self.steps[rank] += lines
                    self._grown_seconds[rank] = self.last_growth_seconds = now_seconds

    def _was_touched(self, file: Path) -> bool:
        before = self._touched.get(file)
        with contextlib.suppress(OSError):
            self._touched[file] = file.stat().st_mtime_ns
        return self._touched.get(file) != before

    def _new_lines(self, file: Path) -> bytes:
        """Whole lines that were added since the last look."""
        known = self._read_bytes.get(file, 0)
        try:
            if file.stat().st_size == known:
                return b""
            with file.open("rb") as stream:
                stream.seek(known)
                added = stream.read()
        except OSError:
            return b""
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes[file] = known + len(whole)
        return whole

    def silent_seconds(self, now_seconds: float) -> list[float]:
        """Time since each rank's last line, or since the start."""
        return [now_seconds - grown for grown in self._grown_seconds]

    @property
    def folder_is_gone(self) -> bool:
        """True if nobody can write into the folder of the files any more."""
        return not self._folder.is_dir()

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


class Watch:
    """Watches one job."""

    def __init__(self, job: Job, heartbeat: Heartbeat, launch: LaunchSpec, limits: Limits) -> None:
        self._job = job
        self._heartbeat = heartbeat
        self._launch = launch
        self._limits = limits
        self._start_seconds = heartbeat.last_growth_seconds

    def wait(self, stop: threading.Event, on_step: Callable[[int], None] | None) -> Outcome | None:
        """Block until the job has ended by itself (None), or must be ended (why)."""
        reported = 0
        while True:
            job = self._job.wait(self._limits.tick_seconds)
            now = time.monotonic()
            self._heartbeat.poll(now)
            if on_step is not None and (finished := min(self._heartbeat.steps)) > reported:
                reported = finished
                on_step(reported)
            if job.phase == "ended" and (job.exit_code == 0 or not stop.is_set()):
                return None
            outcome = self._reason_to_end(now, stop)
            if outcome is not None:
                return outcome

    def _reason_to_end(self, now: float, stop: threading.Event) -> Outcome | None:
        if stop.is_set():
            why = stop.why if isinstance(stop, StopRequest) else StopRequest.why
            return Outcome("interrupted", f"{why} {self._progress()}")
        if self._heartbeat.folder_is_gone:
            return Outcome("crashed", "the folder of the run was removed while it was going on")
        if now - self._start_seconds > self._launch.timeout_seconds:
            limit = self._launch.timeout_seconds
            silent_seconds = now - self._heartbeat.last_growth_seconds
            return Outcome(
                "timeout",
                f"not finished within launch.timeout_seconds = {limit:g} {self._progress()};"
                f" {self._circumstances(self._job.symptoms(), now)}",
                # Ranks that still step are a step apart by chance.
                self._heartbeat.rank_behind() if silent_seconds > _STUCK_SECONDS else None,
            )
        allowed = self._launch.hang_seconds
        if not any(self._heartbeat.steps):
            allowed += self._limits.startup_allowance_seconds
        if now - self._heartbeat.last_growth_seconds > allowed:
            return self._hang(allowed, now)
        return None

    def _hang(self, allowed_seconds: float, now: float) -> Outcome:
        """Name the process that holds up the others, if the evidence shows one."""
        seen = self._job.symptoms()
        rank, evidence = self._suspect(seen)
        circumstances = self._circumstances(seen, now)
        self._job.ask_for_stacks()
        time.sleep(_STACK_SECONDS)
        return Outcome(
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
        behind = self._heartbeat.rank_behind()
        if behind is not None:
            return behind, f"rank {behind} is behind the others; "
        return None, ""

    def _circumstances(self, seen: Symptoms, now: float) -> str:
        """Tells a starved machine from a stuck rank."""
        silent = self._heartbeat.silent_seconds(now)
        shown = list(range(len(silent)))
        if len(shown) > _RANKS_SHOWN:
            shown = sorted(shown, key=lambda rank: -silent[rank])[:_RANKS_SHOWN]
        ranks = ", ".join(
            f"rank {rank} {seen.ranks.get(rank, 'gone')}, last line {silent[rank]:.0f} s ago"
            for rank in shown
        )
        more = f", {len(silent) - len(shown)} more ranks" if len(silent) > len(shown) else ""
        return f"{ranks}{more}" + (f"; {seen.load}" if seen.load else "")

    def _progress(self) -> str:
        steps = self._heartbeat.steps
        if not any(steps):
            return "(before the first step)"
        if len(set(steps)) == 1:
            return f"(after step {steps[0]})"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
        return f"(steps finished by {counts})"
