"""Turns: runs that are all started at once and train one at a time, some steps each.

    arm a   start-up  |1|          |4|5|          |8|  end
    arm b   start-up     |2|    |3|      |6|    |7|      end        | |: a turn; else parked

Each run is a launch of its own: its processes, its folder, its watch. The barrier in the process
that launches them says which arm trains next. A parked rank is blocked in the kernel, waiting for a
byte, and takes no processor time. The order is reversed from one round of turns to the next, so a
machine that gets steadily slower treats both alike. Behind its last step a run is parked until all
have ended theirs; then they write their reports one after the other.

A rank's connection is closed with its process, so no run waits for one that is dead.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.errors import BenchError

TURNS_VARIABLE: Final = "MFSDP_BENCH_TURNS"
_BYTE: Final = b"."
_LONG: Final = 60


class BarrierGoneError(BenchError):
    """The process that hands out turns has gone; the launcher of this run ends it as well."""


class Turns:
    """A rank's side: parks it until its run may train. Without a connection it never does."""

    def __init__(
        self, count: int = 1, steps: int = 1, connection: socket.socket | None = None
    ) -> None:
        self._count = count
        self._steps = steps
        self._connection = connection
        self._turn = -1

    @classmethod
    def from_environment(cls, steps: int) -> Turns:
        """Of a run of so many steps."""
        count, _, path = os.environ.get(TURNS_VARIABLE, "").partition(":")
        return cls.at(path, int(count), steps) if path else cls()

    @classmethod
    def at(cls, path: str, count: int, steps: int) -> Turns:
        """`count` turns of so many `steps` together, at the barrier behind `path`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return cls(count, steps, connection)

    def before(self, step: int) -> int | None:
        """The turn (from 0) that `step` (from 1) belongs to; parks where a turn begins.

        Raises:
            BarrierGoneError: no turn will come.
        """
        if self._connection is None:
            return None
        turn = (step - 1) * self._count // self._steps
        if turn != self._turn:
            self._park(self._connection)
            self._turn = turn
        return turn

    def after_all_steps(self) -> None:
        """Park until every run has ended its steps, and those before this one their reports.

        Raises:
            BarrierGoneError: as `before`.
        """
        if self._connection is not None:
            self._park(self._connection)

    def leave(self) -> None:
        """Nothing that takes time is left to do."""
        if self._connection is not None:
            self._connection.close()

    @staticmethod
    def _park(connection: socket.socket) -> None:
        try:
            connection.sendall(_BYTE)
            answer = connection.recv(1)
        except OSError as error:
            raise BarrierGoneError(f"no turn will come: {error}") from error
        if not answer:
            raise BarrierGoneError("no turn will come: the launcher has closed the barrier")


class BarrierSlot:
    """One run at a barrier: the way in for its ranks, and a clock that stands while it is parked.

    Args:
        path: of the socket.
        ranks: of the run.
        turns: that it takes.
    """

    def __init__(self, path: Path, ranks: int, turns: int) -> None:
        self._variables = {TURNS_VARIABLE: f"{turns}:{path}"}
        self._ranks = ranks
        self._joined = 0
        self._connections: dict[socket.socket, bool] = {}
        self._lock = threading.Lock()
        self._parked_since: float | None = None
        self._parked_seconds = 0.0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(ranks)

    def variables(self) -> Mapping[str, str]:
        """For the environment of the ranks."""
        return self._variables

    def clock(self) -> float:
        """Monotonic seconds without those in which all ranks were parked."""
        with self._lock:
            now = time.monotonic() if self._parked_since is None else self._parked_since
            return now - self._parked_seconds

    @property
    def is_away(self) -> bool:
        """Every rank is parked or gone."""
        return self._joined == self._ranks and all(self._connections.values())

    def join(self) -> socket.socket:
        """Take in a rank that knocks."""
        connection, _ = self.listener.accept()
        self._joined += 1
        self._connections[connection] = False
        return connection

    def hear(self, connection: socket.socket) -> bool:
        """A rank has parked; False: it is gone."""
        parked = False
        with contextlib.suppress(OSError):
            parked = bool(connection.recv(1))
        if parked:
            self._connections[connection] = True
        else:
            del self._connections[connection]
        with self._lock:  # the clock stands while ranks wait for others' turns
            if self._parked_since is None and self._connections and self.is_away:
                self._parked_since = time.monotonic()
        return parked

    def go(self) -> None:
        """Let its ranks train."""
        with self._lock:
            if self._parked_since is not None:
                self._parked_seconds += time.monotonic() - self._parked_since
                self._parked_since = None
        for connection in self._connections:
            self._connections[connection] = False
            with contextlib.suppress(OSError):  # it has just died, which `hear` will find out
                connection.sendall(_BYTE)

    def close(self) -> None:
        """Parked ranks are told that no turn will come."""
        for one in (self.listener, *self._connections):
            one.close()


class Barrier:
    """Lets one run train at a time, in the thread that it starts; close it when all have ended.

    Args:
        ranks: of each run, by its name, in the order of the first round.
        turns: that each takes.
    """

    def __init__(self, ranks: Mapping[str, int], turns: int) -> None:
        # The address of a socket has room for some 100 characters.
        place = tempfile.gettempdir()
        self._folder = Path(
            tempfile.mkdtemp("", "mfsdp-turns-", "/tmp" if len(place) > _LONG else place)
        )
        self.slots = {
            name: BarrierSlot(self._folder / str(index), count, turns)
            for index, (name, count) in enumerate(ranks.items())
        }
        self._order = self._whose_turn(turns)
        self._waits_for = list(self.slots.values())
        self._over, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.close()
        self._thread.join()
        for slot in self.slots.values():
            slot.close()
        self._wake.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _whose_turn(self, turns: int) -> Iterator[BarrierSlot]:
        """A round per turn, every other one backwards, and one for the reports."""
        forwards = list(self.slots.values())
        for turn in range(turns):
            yield from reversed(forwards) if turn % 2 else forwards
        yield from forwards

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for slot in self.slots.values():
                selector.register(slot.listener, selectors.EVENT_READ, slot)
            while True:
                for key, _ in selector.select():
                    slot, ready = key.data, key.fileobj
                    if slot is None or not isinstance(ready, socket.socket):
                        return
                    if ready is slot.listener:
                        selector.register(slot.join(), selectors.EVENT_READ, slot)
                    elif not slot.hear(ready):
                        selector.unregister(ready)
                        ready.close()
                self._hand_on()

    def _hand_on(self) -> None:
        """The next turn, once everybody has come and whoever had the last one is away."""
        while all(slot.is_away for slot in self._waits_for):
            holder = next(self._order, None)
            if holder is None:
                return
            self._waits_for = [holder]
            holder.go()
