"""Waiting for the ranks: until they end by themselves, hang, run out of time, or are stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.launch.heartbeat import Heartbeat
from bench.launch.protocol import Job
from bench.record import RunState
from bench.spec import LaunchSpec

_STACK_SECONDS = 0.5


@dataclass(frozen=True)
class Limits:
    """Times of the launcher, in seconds.

    tick: how often it looks at the step files and at `stop`; between two looks it sleeps in the
    kernel. startup_allowance: added to `hang_seconds` for the first step, in which ranks import
    torch, read data and find each other. grace: between SIGTERM and SIGKILL.
    """

    tick_seconds: float = 0.5
    startup_allowance_seconds: float = 120.0
    grace_seconds: float = 3.0


@dataclass(frozen=True)
class Ending:
    """Why the launcher ends a run that would have gone on."""

    state: RunState
    reason: str
    failed_rank: int | None = None


class Watch:
    """Watches one job."""

    def __init__(self, job: Job, heartbeat: Heartbeat, launch: LaunchSpec, limits: Limits) -> None:
        self._job = job
        self._heartbeat = heartbeat
        self._launch = launch
        self._limits = limits
        self._start_seconds = heartbeat.last_growth_seconds

    def wait(self, stop: threading.Event, on_step: Callable[[int], None] | None) -> Ending | None:
        """Block until the job has ended by itself (None), or must be ended (why)."""
        reported = 0
        while True:
            over = self._job.wait(self._limits.tick_seconds).phase == "ended"
            now = time.monotonic()
            self._heartbeat.poll(now)
            if on_step is not None and self._heartbeat.finished_steps > reported:
                reported = self._heartbeat.finished_steps
                on_step(reported)
            if over:
                return None
            ending = self._reason_to_end(now, stop)
            if ending is not None:
                return ending

    def _reason_to_end(self, now: float, stop: threading.Event) -> Ending | None:
        if stop.is_set():
            return Ending("interrupted", f"stopped on request {self._progress()}")
        if now - self._start_seconds > self._launch.timeout_seconds:
            limit = self._launch.timeout_seconds
            return Ending(
                "timeout",
                f"not finished within launch.timeout_seconds = {limit:g} {self._progress()}",
                self._heartbeat.rank_behind(),
            )
        allowed = self._launch.hang_seconds
        if not self._heartbeat.started:
            allowed += self._limits.startup_allowance_seconds
        if now - self._heartbeat.last_growth_seconds > allowed:
            return self._hang(allowed)
        return None

    def _hang(self, allowed_seconds: float) -> Ending:
        """Name the rank that holds the others up, as far as the evidence goes."""
        states = self._job.symptoms().ranks
        stopped = [rank for rank, state in sorted(states.items()) if state == "stopped"]
        behind = self._heartbeat.rank_behind()
        guilty = stopped[0] if stopped else behind
        evidence = ""
        if stopped:
            evidence = f"; rank {', '.join(map(str, stopped))} is stopped (SIGSTOP)"
        elif behind is not None:
            evidence = f"; rank {behind} is behind the others"
        self._job.ask_for_stacks()
        time.sleep(_STACK_SECONDS)
        return Ending(
            "hang",
            f"no rank finished a step for {allowed_seconds:g} s {self._progress()}{evidence};"
            " stacks are in logs/rank<N>.log",
            guilty,
        )

    def _progress(self) -> str:
        steps = self._heartbeat.steps
        if not any(steps):
            return "(before the first step)"
        if len(set(steps)) == 1:
            return f"(after step {steps[0]})"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
        return f"(steps finished by {counts})"
