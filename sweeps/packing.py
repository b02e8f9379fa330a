"""Runs side by side on one machine, each on cores or devices of its own.

A sweep allows it (`pack: true`) where its times do not matter: runs share memory bandwidth, caches,
power and the host, so the times of what was packed do not count. Runs begin in the order of the
plan, each as soon as its part of the machine is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from bench.launch.share import Share
from bench.record import FINISHED_GOOD
from bench.resolve.machine import Machine
from bench.resolve.state_bytes import state_bytes_of_all_ranks
from bench.spec import ResolvedRun
from sweeps.execution import RunMaker
from sweeps.progress import SweepStopped, one_at_a_time
from sweeps.resume import PastRun, PlannedRun

Kind = Literal["cores", "devices"]
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Parts:
    """What can be given to runs, by name; memory_bytes: of the host."""

    cores: tuple[str, ...]
    devices: tuple[str, ...]
    memory_bytes: int

    @classmethod
    def of_this_machine(cls) -> Parts:
        """Cores that this process may use, and devices that it sees."""
        machine = Machine.detect()
        count = len(machine.cuda_devices)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = visible.split(",") if visible else [str(index) for index in range(count)]
        cores = tuple(str(core) for core in sorted(os.sched_getaffinity(0)))
        return cls(cores, tuple(name.strip() for name in named[:count]), machine.memory_bytes)

    def of(self, kind: Kind) -> tuple[str, ...]:
        """Those of one kind."""
        return self.cores if kind == "cores" else self.devices


@dataclass(frozen=True)
class _Need:
    """What a run takes: so many parts of a kind, and at least so much memory of the host."""

    kind: Kind
    count: int
    bytes: int

    @classmethod
    def of(cls, run: ResolvedRun) -> _Need:
        launch = run.launch
        if launch.device == "cuda":
            return cls("devices", launch.devices_per_node, 0)
        count = launch.ranks * launch.threads_per_rank
        return cls("cores", count, state_bytes_of_all_ranks(run) or 0)


class Room:
    """What is free of the machine. Runs on cores and runs on devices never overlap."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._taken: dict[int, tuple[_Need, tuple[str, ...]]] = {}
        self._changed = threading.Condition()

    def take(self, number: int, run: ResolvedRun, stop: threading.Event) -> Share | None:
        """Wait for room for run `number`; None for a run that takes the whole machine.

        Also None once `stop` is set: look at it.
        """
        need = _Need.of(run)
        all_of_it = self._parts.of(need.kind)
        count = min(need.count, len(all_of_it))
        with self._changed:
            while not stop.is_set():
                free = self._free(need)
                if len(free) >= count:
                    names = free[:count]
                    self._taken[number] = (need, names)
                    return None if count == len(all_of_it) else Share(need.kind, names)
                # A signal that sets `stop` notifies nobody.
                self._changed.wait(_LOOK_SECONDS)
        return None

    def _free(self, need: _Need) -> tuple[str, ...]:
        others = [taken for taken, _ in self._taken.values()]
        together = need.bytes + sum(other.bytes for other in others)
        alien = any(other.kind != need.kind for other in others)
        if others and (alien or together > self._parts.memory_bytes):
            return ()
        used = {name for _, names in self._taken.values() for name in names}
        return tuple(name for name in self._parts.of(need.kind) if name not in used)

    def give_back(self, number: int) -> None:
        """Run `number` is over."""
        with self._changed:
            self._taken.pop(number, None)
            self._changed.notify_all()

    @property
    def most_at_once(self) -> int:
        """Runs that can go on side by side."""
        return max(len(self._parts.cores), len(self._parts.devices), 1)


class _Packed:
    """The runs of one call."""

    def __init__(self, maker: RunMaker, total: int, room: Room, max_failures: int | None) -> None:
        self._maker = replace(maker, publish=one_at_a_time(maker.publish))
        self._total = total
        self._room = room
        self._max_failures = max_failures
        self._failures = 0
        self._lock = threading.Lock()
        self.why_stop = ""

    def run(self, number: int, run: PlannedRun, share: Share | None) -> PastRun:
        try:
            past = self._maker.run(run, number, self._total, share=share)
        except BaseException:
            # What cannot be kept ends the sweep: the others are ended, and their records say so.
            self._maker.stop.set()
            raise
        else:
            with self._lock:
                self._judge(past)
            return past
        finally:
            self._room.give_back(number)

    def _judge(self, past: PastRun) -> None:
        self._failures += past.state not in FINISHED_GOOD
        if past.wrong_code and past.arm is not None:
            self.why_stop = f"arm {past.arm} is not the code that was prepared any more; run again"
        elif self._max_failures is not None and self._failures >= self._max_failures:
            some = f"{self._failures} failed run{'s' if self._failures > 1 else ''}"
            self.why_stop = f"{some}, as many as --max-failures"


def run_packed(
    maker: RunMaker,
    runs: Sequence[PlannedRun],
    max_failures: int | None,
    parts: Parts | None = None,
) -> list[PastRun]:
    """As `run_one_by_one`, with as many at once as the machine has parts for.

    parts: of the machine; None looks at this one.
    """
    room = Room(parts or Parts.of_this_machine())
    packed = _Packed(maker, len(runs), room, max_failures)
    started: list[Future[PastRun]] = []
    with ThreadPoolExecutor(room.most_at_once, thread_name_prefix="packed") as threads:
        try:
            for number, run in enumerate(runs, start=1):
                share = room.take(number, run.cell.of(run.arm), maker.stop)
                if maker.stop.is_set() or packed.why_stop:
                    maker.publish(SweepStopped(packed.why_stop or "interrupted"))
                    break
                started.append(threads.submit(packed.run, number, run, share))
        except BaseException:
            maker.stop.set()
            raise
    return [future.result() for future in started]
