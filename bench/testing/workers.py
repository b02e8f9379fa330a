"""Resident ranks as the caller sees them: call a function on all of them, get what each returned.

A rank that raises, dies or does not answer in time ends all of them, since a half-finished
collective leaves a process group unusable; the next call gets new ones, which takes a fork each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any, Literal, Self

from bench.errors import BenchError
from bench.launch.code import checkout_root
from bench.launch.process import signal_name
from bench.testing.call import FunctionCall, Reap, WorkerGroup, World
from bench.testing.hang_clock import HangClock
from bench.testing.worker import CallResult, log_file, request, stack_file, unpacked

_START_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_LOG_CHARACTERS = 20_000


@dataclass(frozen=True)
class WorkerFailure:
    """A rank without a result. text: its traceback, how it ended, or its stack; log: what it wrote.

    Of the log there is the end.
    """

    rank: int
    kind: Literal["raised", "died", "hung"]
    text: str
    log: tuple[str, ...] = ()


class WorkersError(BenchError):
    """A call that did not come back from every rank. returned: what did, by rank."""

    def __init__(self, failures: Sequence[WorkerFailure], returned: dict[int, Any]) -> None:
        said = ["\n".join((f"rank {f.rank}: {f.text}", *f.log)) for f in failures]
        super().__init__("\n".join(said))
        self.failures = tuple(failures)
        self.returned = returned


class ForkServer:
    """A process that forks ranks. A context manager; nothing it started outlives it."""

    def __init__(
        self, device: str = "cpu", paths: tuple[str, ...] = (), modules: tuple[str, ...] = ()
    ) -> None:
        """paths: what ranks import from first. modules: what they find loaded, never the core."""
        self._device = device
        self.paths = paths
        self._modules = modules
        self._stack = contextlib.ExitStack()
        # Callers in several threads; an answer follows its question.
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        ours, theirs = Pipe()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        module = ("-m", "bench.testing.fork_server")
        self._process = subprocess.Popen(
            [sys.executable, *module, str(os.getpid()), str(theirs.fileno()), *self._modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(self._device),
        )
        theirs.close()
        self._requests = ours
        if not ours.poll(_START_SECONDS):
            self.__exit__()
            raise BenchError("the process that forks ranks did not start")
        try:
            ours.recv()
        except EOFError:
            self.__exit__()
            raise BenchError("the process that forks ranks ended; its error is above") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()
        self._stack.close()

    @contextlib.contextmanager
    def workers(
        self,
        count: int,
        core: Path | None = None,
        prepare: Callable[[], Any] | None = None,
        calls_of_a_group: int | None = None,
    ) -> Iterator[Workers]:
        """Up to `count` ranks at a time that import mfsdp_core from the folder `core`."""
        made = Workers(self, count, core, prepare, calls_of_a_group)
        try:
            yield made
        finally:
            made.end()

    def fork(self, count: int, core: Path | None) -> tuple[list[int], list[Connection], Path]:
        """Process ids, connections in rank order, and the folder of their logs."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        address = str(folder / "socket")
        with Listener(address, family="AF_UNIX", backlog=count) as listener:
            group = WorkerGroup(count, address, folder, self._device, core, self.paths)
            with self._asking:
                self._requests.send(group)
                pids: list[int] = self._requests.recv()
            pipes = dict(_accepted(listener) for _ in range(count))
        return pids, [pipes[rank] for rank in range(count)], folder

    def reap(self, pids: Sequence[int]) -> list[int]:
        """Exit codes of ranks that end, negative for a signal; waits for each."""
        with self._asking:
            self._requests.send(Reap(tuple(pids)))
            codes: list[int] = self._requests.recv()
        return codes


def _accepted(listener: Listener) -> tuple[int, Connection]:
    pipe: Any = listener.accept()
    return pipe.recv(), pipe


class Workers:
    """A set of ranks, made when the first call asks for it and again after a failure."""

    def __init__(
        self,
        server: ForkServer,
        count: int,
        core: Path | None = None,
        prepare: Callable[[], Any] | None = None,
        calls_of_a_group: int | None = None,
    ) -> None:
        """prepare: a module-level function that new ranks call once, before anything else.

        calls_of_a_group: all process groups, each with three threads that poll, last so many calls.
        """
        self._server = server
        self._count = count
        self._core = core
        self._prepare = prepare
        self._most_calls, self._calls = calls_of_a_group, 0
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._folder = Path()
        self._world: World | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks; empty when none is started."""
        return list(self._pids)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float,
        ranks: int | None = None,
        cpu_seconds: float | None = None,
    ) -> list[Any]:
        """`function(*arguments)` on the first `ranks` ranks: what each returned, in rank order.

        function: of a module, so that ranks find it. seconds: at most, of which waiting for a
        processor does not count (`hang_clock`). cpu_seconds: of processor time that a rank may use.

        Raises:
            WorkersError: not every rank returned. All ranks are ended.
        """
        call = FunctionCall.of(function, arguments)
        if not self._pids:
            self._start()
        return self._run(call, ranks or self._count, seconds, cpu_seconds)

    def kill(self) -> None:
        """Kill every rank: a call that another thread waits for ends as one whose ranks died."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End every rank now."""
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(OSError, EOFError):
            self._server.reap(self._pids)
        self._pids, self._pipes, self._world = [], [], None

    def _start(self) -> None:
        self._pids, self._pipes, self._folder = self._server.fork(self._count, self._core)
        if self._prepare is not None:
            self._run(FunctionCall.of(self._prepare), self._count, _START_SECONDS)

    def _run(
        self, call: FunctionCall, ranks: int, seconds: float, cpu_seconds: float | None = None
    ) -> list[Any]:
        # Ranks that leave a group for another and come back need a rendezvous of their own.
        used = self._calls == self._most_calls
        if self._world is None or self._world.ranks != ranks or used:
            self._calls = 0
            rendezvous = tempfile.mktemp(dir=self._folder, prefix="rendezvous-")
            self._world = World(ranks, rendezvous)
        self._calls += 1
        content = request(self._world, call)
        for pipe in self._pipes[:ranks]:
            with contextlib.suppress(OSError):
                pipe.send_bytes(content)
        try:
            answers, dead, limit = self._collect(ranks, seconds, cpu_seconds)
        except BaseException:
            # Interrupted, as by a time limit: the ranks are in the middle of a call.
            self.end()
            raise
        if len(answers) == ranks and not any(answer.error for answer in answers.values()):
            return [answers[rank].value for rank in range(ranks)]
        failures = self._failures(ranks, answers, dead, limit)
        self.end()
        returned = {rank: a.value for rank, a in answers.items() if not a.error}
        raise WorkersError(failures, returned)

    def _collect(
        self, ranks: int, seconds: float, cpu_seconds: float | None
    ) -> tuple[dict[int, CallResult], list[int], str]:
        """Answers, dead ranks, and the limit that ended the waiting, if one did."""
        answers: dict[int, CallResult] = {}
        dead: list[int] = []
        clock, limit = HangClock(self._pids[:ranks]), seconds
        while len(answers) + len(dead) < ranks and clock.seconds() < limit:
            if cpu_seconds is not None and clock.processor_seconds > cpu_seconds:
                return answers, dead, f"{cpu_seconds:g} s of processor time"
            waiting = {self._pipes[r]: r for r in range(ranks) if r not in {*answers, *dead}}
            for pipe in wait(list(waiting), timeout=min(limit, _LOOK_SECONDS)):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    # By value; the connection's own way would share memory with the rank.
                    answers[rank] = unpacked(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
                if rank in dead or answers[rank].error:
                    limit = min(limit, clock.seconds() + _GRACE_SECONDS)
        return answers, dead, f"{seconds:g} s"

    def _failures(
        self, ranks: int, answers: dict[int, CallResult], dead: list[int], limit: str
    ) -> list[WorkerFailure]:
        raised = {r: a.error for r, a in answers.items() if a.error}
        failures = {r: WorkerFailure(r, "raised", e, self._log(r)) for r, e in raised.items()}
        for rank, code in zip(dead, self._server.reap([self._pids[r] for r in dead]), strict=True):
            ending = f"exit code {code}" if code >= 0 else signal_name(-code)
            failures[rank] = WorkerFailure(rank, "died", f"died with {ending}", self._log(rank))
        silent = [rank for rank in range(ranks) if rank not in answers and rank not in dead]
        for rank, stack in zip(silent, self._stacks(silent), strict=True):
            text = f"no answer (limit {limit}), was in\n{stack}"
            failures[rank] = WorkerFailure(rank, "hung", text, self._log(rank))
        return [failures[rank] for rank in sorted(failures)]

    def _log(self, rank: int) -> tuple[str, ...]:
        text = log_file(self._folder, rank).read_text(encoding="utf-8", errors="replace")
        return tuple(line for line in text[-_LOG_CHARACTERS:].splitlines() if line.strip())

    def _stacks(self, silent: list[int]) -> list[str]:
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_STACK_SECONDS if silent else 0)
        return [
            stack_file(self._folder, rank).read_text(encoding="utf-8", errors="replace")
            for rank in silent
        ]


def _environment(device: str) -> dict[str, str]:
    """One thread each, this checkout first, gloo on the loopback interface."""
    path = os.pathsep.join(filter(None, (str(checkout_root()), os.environ.get("PYTHONPATH"))))
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    added = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", **single}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": ""}
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**os.environ, **added}
