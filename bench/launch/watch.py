"""Waiting for the ranks: until they end by themselves, hang, run out of time, or are stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.launch.heartbeat import Heartbeat
from bench.launch.outcome import Outcome
from bench.launch.protocol import Job, Symptoms
from bench.record import RunState
from bench.spec import LaunchSpec

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
    """A request to end a run, with its reason and the state that the record gets."""

    why = "stopped on request"
    state: RunState = "interrupted"


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
            if on_step is not None and self._heartbeat.finished_steps > reported:
                reported = self._heartbeat.finished_steps
                on_step(reported)
            if job.phase == "ended" and (job.exit_code == 0 or not stop.is_set()):
                return None
            outcome = self._reason_to_end(now, stop)
            if outcome is not None:
                return outcome

    def _reason_to_end(self, now: float, stop: threading.Event) -> Outcome | None:
        if stop.is_set():
            asked = stop if isinstance(stop, StopRequest) else StopRequest
            return Outcome(asked.state, f"{asked.why} {self._progress()}")
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
        if not self._heartbeat.started:
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
