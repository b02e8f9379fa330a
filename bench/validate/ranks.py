"""The resident ranks as the checker sees them: give a case, get what every rank saw.

A rank that raises, dies or does not answer in time ends all of them, since a half-finished
collective leaves a process group unusable; the next case gets new ones, which takes a fork each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any, Literal, Self

from bench.errors import BenchError
from bench.launch.rank_code import checkout_root
from bench.validate.cases import Case
from bench.validate.observation import Seen
from bench.validate.rank import Answer, Order, stack_file
from bench.validate.serialization import unpacked
from bench.validate.worker_group import WorkerGroup

_START_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5


@dataclass(frozen=True)
class CaseOutcome:
    """kind: `seen`, `unsupported`, `raised` (an exception), `died` or `hung`.

    seen: of all ranks, in order. rank, text: of the rank that says most, for the other kinds.
    """

    kind: Literal["seen", "unsupported", "raised", "died", "hung"]
    seen: tuple[Seen, ...] = ()
    rank: int | None = None
    text: str = ""


class ForkServer:
    """Forks ranks. A context manager; nothing it started outlives it."""

    def __init__(self, device: str = "cpu", paths: tuple[str, ...] = ()) -> None:
        self._device = device
        self._paths = paths
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        ours, theirs = Pipe()
        self._folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="validate-"))
        )
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.validate.fork_server",
                str(os.getpid()),
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(self._device),
        )
        theirs.close()
        self._requests = ours
        self._groups = 0
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
    def ranks(self, count: int, core: Path | None = None) -> Iterator[Ranks]:
        """Up to `count` ranks at a time that import mfsdp_core from the folder `core`."""
        made = Ranks(self, count, core)
        try:
            yield made
        finally:
            made.end()

    def fork(self, count: int, core: Path | None) -> tuple[list[int], list[Connection], Path]:
        """Process ids, connections in rank order, and the folder of their logs."""
        self._groups += 1
        folder = self._folder / str(self._groups)
        folder.mkdir()
        address = str(folder / "socket")
        with Listener(address, family="AF_UNIX", backlog=count) as listener:
            group = WorkerGroup(count, address, folder, self._device, core, self._paths)
            self._requests.send(group)
            pids: list[int] = self._requests.recv()
            pipes = dict(_accepted(listener) for _ in range(count))
        return pids, [pipes[rank] for rank in range(count)], folder


def _accepted(listener: Listener) -> tuple[int, Connection]:
    pipe: Any = listener.accept()
    return pipe.recv(), pipe


class Ranks:
    """A set of ranks, made when the first case asks for it and again after a failure."""

    def __init__(self, fork_server: ForkServer, count: int, core: Path | None) -> None:
        self._fork_server = fork_server
        self._count = count
        self._core = core
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._folder = Path()
        self._worlds: dict[int, str] = {}

    def run(self, case: Case, seconds: float) -> CaseOutcome:
        """Run `case` on the first `case.ranks` ranks; at most `seconds`."""
        if not self._pids:
            self._pids, self._pipes, self._folder = self._fork_server.fork(self._count, self._core)
            self._worlds = {}
        # Ranks that leave a group for another and come back need a rendezvous of their own.
        if case.ranks not in self._worlds:
            self._worlds = {case.ranks: tempfile.mktemp(dir=self._folder, prefix="rendezvous-")}
        order = Order(case, self._worlds[case.ranks])
        for pipe in self._pipes[: case.ranks]:
            with contextlib.suppress(OSError):
                pipe.send(order)
        outcome = self._collect(case.ranks, seconds)
        if outcome.kind not in ("seen", "unsupported"):
            self.end()
        return outcome

    def end(self) -> None:
        """End every rank now."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()
        self._pids, self._pipes = [], []

    def _collect(self, count: int, seconds: float) -> CaseOutcome:
        answers: dict[int, Answer] = {}
        dead: list[int] = []
        deadline = time.monotonic() + seconds
        while len(answers) + len(dead) < count:
            waiting = [self._pipes[r] for r in range(count) if r not in answers and r not in dead]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    # By value; the connection's own way would share memory with the rank.
                    answers[rank] = unpacked(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
            if dead or any(answer.kind == "raised" for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return self._outcome(count, answers, dead)

    def _outcome(self, count: int, answers: dict[int, Answer], dead: list[int]) -> CaseOutcome:
        kinds = {answer.kind for answer in answers.values()}
        if len(answers) == count and kinds == {"seen"}:
            return CaseOutcome("seen", tuple(answers[r].seen for r in range(count)))  # type: ignore[misc]
        if len(answers) == count and kinds == {"unsupported"}:
            return CaseOutcome("unsupported", rank=0, text=answers[0].text)
        raised = [answer for answer in answers.values() if answer.kind == "raised"]
        if raised:
            first = min(raised, key=lambda answer: (_is_of_a_peer(answer.text), answer.rank))
            return CaseOutcome("raised", rank=first.rank, text=first.text)
        if dead:
            log = self._folder / f"rank{dead[0]}.log"
            return CaseOutcome("died", rank=dead[0], text=log.read_text(errors="replace")[-2000:])
        silent = [rank for rank in range(count) if rank not in answers]
        refused = [f"rank {a.rank} refused: {a.text}" for a in answers.values() if a.text]
        return CaseOutcome("hung", rank=silent[0], text="\n".join([*refused, self._stacks(silent)]))

    def _stacks(self, silent: list[int]) -> str:
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return "\n".join(
            f"rank {rank} was in\n{stack_file(self._folder, rank).read_text(errors='replace')}"
            for rank in silent
        )


def _is_of_a_peer(text: str) -> bool:
    """Whether a rank failed because another one had: it came first by number, not in time."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return any(word in last for word in ("Connection closed", "Connection reset", "gloo"))


def _environment(device: str) -> dict[str, str]:
    """One thread each, this checkout first, gloo on the loopback interface."""
    path = os.pathsep.join(filter(None, (str(checkout_root()), os.environ.get("PYTHONPATH"))))
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    added = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", **single}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": ""}
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**os.environ, **added}
