"""Where blocks run: one after the other, or side by side on cores or devices of their own.

A sweep allows it (`pack: true`) where its times do not matter: runs share memory bandwidth, caches,
power and the host, so the times of what was packed do not count. Runs begin in the order of the
plan, each as soon as its part of the machine is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from bench.launch.share import Share
from bench.resolve.device_rules import least_bytes
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun

T = TypeVar("T")
Kind = Literal["cores", "devices"]
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Resources:
    """What can be given to runs, by name; memory_bytes: of the host."""

    cores: tuple[str, ...]
    devices: tuple[str, ...]
    memory_bytes: int

    @classmethod
    def of_this_machine(cls) -> Resources:
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
        return cls("cores", count, least_bytes(run) or 0)


class ResourcePool:
    """What is free of the machine, and the blocks that go on side by side on what they took.

    Runs on cores and runs on devices never overlap. A block that has the whole machine runs in the
    thread that starts it.

    Args:
        parts: of the machine; None gives the whole of it to every block.
        stop: ends the wait, and is set where a block ends with an error: what cannot be kept ends
            the sweep, and the records of the others say so.
    """

    def __init__(self, parts: Resources | None, stop: threading.Event) -> None:
        self._parts = parts
        self._stop = stop
        self._taken: dict[int, tuple[_Need, tuple[str, ...]]] = {}
        self._changed = threading.Condition()
        most = max(len(parts.cores), len(parts.devices)) if parts else 1
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="packed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what has been started."""
        if kind is not None:
            self._stop.set()
        self._threads.shutdown()

    def take(self, number: int, run: ResolvedRun) -> Share | None:
        """Wait for the resources of run `number`; None for a run that takes the whole machine.

        Also None once `stop` is set: look at it.
        """
        if self._parts is None:
            return None
        need = _Need.of(run)
        all_of_it = self._parts.of(need.kind)
        count = min(need.count, len(all_of_it))
        with self._changed:
            while not self._stop.is_set():
                free = self._free(self._parts, need)
                if len(free) >= count:
                    names = free[:count]
                    self._taken[number] = (need, names)
                    return None if count == len(all_of_it) else Share(need.kind, names)
                # A signal that sets `stop` notifies nobody.
                self._changed.wait(_LOOK_SECONDS)
        return None

    def _free(self, parts: Resources, need: _Need) -> tuple[str, ...]:
        others = [taken for taken, _ in self._taken.values()]
        together = need.bytes + sum(other.bytes for other in others)
        alien = any(other.kind != need.kind for other in others)
        if others and (alien or together > parts.memory_bytes):
            return ()
        used = {name for _, names in self._taken.values() for name in names}
        return tuple(name for name in parts.of(need.kind) if name not in used)

    def start(
        self, number: int, share: Share | None, work: Callable[[Share | None], T]
    ) -> Callable[[], T]:
        """Begin `work` with the `share` that `take` gave; what is returned waits for its result."""

        def released() -> T:
            try:
                return work(share)
            except BaseException:
                self._stop.set()
                raise
            finally:
                with self._changed:
                    self._taken.pop(number, None)
                    self._changed.notify_all()

        if share is not None:
            return self._threads.submit(released).result
        result = released()
        return lambda: result
