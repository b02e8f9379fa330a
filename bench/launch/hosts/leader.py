"""`Leader`: the first host. It decides what is run, and has the others start their agents.

torchrun's own rendezvous brings the agents together, run by run; its port and a free one for the
orders are the first host's. Where the orders are taken stands in the results folder, which all
hosts share, with a key that nobody else can read.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from bench.errors import BenchError, NothingMeasuredError, UsageError
from bench.launch.hosts.channel import Channel, Message
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import Job, JobState, Order, Symptoms
from bench.launch.rank_code import RankCode
from bench.launch.rendezvous import NODE_NAME_VARIABLE, NODE_VARIABLE, Rendezvous
from bench.launch.stop_request import StopRequest

MEETING = "hosts.json"
CODE: TypeAdapter[RankCode] = TypeAdapter(RankCode)
# Ranks elsewhere notice a failed one by themselves, and say more about it than their end does.
_LAST_WORDS_SECONDS = 5.0
_CANCEL_SECONDS = 15.0


@dataclass(eq=False)
class Host:
    """Another host. ends: exit code of its agent by run folder. why: it has left, or was lost."""

    name: str
    channel: Channel
    ends: dict[str, int] = field(default_factory=dict)
    why: str | None = None


class Leader:
    """Meets the other hosts, and is the launcher of runs on all of them. A context manager.

    Args:
        hosts: all of them; this machine is the first.
        results: the results folder.
        arguments: of the command line, which must be the same everywhere.
    """

    job = None

    def __init__(self, hosts: Sequence[str], results: Path, arguments: Sequence[str]) -> None:
        self._names = tuple(hosts)
        self._arguments = list(arguments)
        self._file = results / MEETING
        self._others: dict[int, Host] = {}
        self._refused = ""
        self._changed = threading.Condition()
        self._stop: StopRequest | None = None
        self._over = False
        self._code = NothingMeasuredError.exit_code

    def __enter__(self) -> Self:
        key = secrets.token_bytes(32)
        self._listener = Listener(("", 0), backlog=len(self._names), authkey=key)
        meeting = {"address": self._names[0], "port": self._listener.address[1], "key": key.hex()}
        _write_private(self._file, json.dumps(meeting))
        threading.Thread(target=self._welcome, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, BenchError):
            self._code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            self._code = 130
        self._over = True
        self._file.unlink(missing_ok=True)
        self._listener.close()
        for host in self._others.values():
            host.channel.send({"end": self._code})
            host.channel.close()

    def ended(self, code: int) -> None:
        """What the others are told: the exit code of this command."""
        self._code = code

    def meet(self, seconds: float) -> None:
        """Wait for every other host.

        Raises:
            NothingMeasuredError: some have not come in time.
            UsageError: one came with another command.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._others) < len(self._names) - 1 and not self._refused:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
        if self._refused:
            raise UsageError(self._refused)
        absent = [n for n in range(1, len(self._names)) if n not in self._others]
        if absent:
            raise NothingMeasuredError(
                f"{len(absent)} of {len(self._names)} hosts have not come within {seconds:g} s:"
                f" {', '.join(self._names[n] for n in absent)}. Start the same command there, with"
                f" the same results folder ({self._file.parent}); --hosts-timeout waits longer"
            )

    def stop_if_lost(self, stop: StopRequest) -> None:
        """Set `stop` once a host is lost: no run can go on, and none be started."""
        self._stop = stop
        for host in self._others.values():
            if host.why is not None:
                self._lose(host)

    @property
    def lost(self) -> str:
        """Why the hosts cannot go on; empty while they can."""
        return next((_lost(host) for host in self._others.values() if host.why is not None), "")

    def start(self, order: Order) -> Job:
        """Start an agent on as many hosts as the run takes, the first ones."""
        nodes = order.resolved.launch.nodes
        if nodes == 1:
            return LocalJob(order, {NODE_NAME_VARIABLE: self._names[0]})
        meeting = Rendezvous.at(self._names[0], nodes).variables()
        others = [self._others[number] for number in range(1, nodes)]
        for number, host in enumerate(others, start=1):
            variables = {NODE_VARIABLE: str(number), NODE_NAME_VARIABLE: host.name}
            host.channel.send(
                {
                    "start": str(order.run_dir),
                    "resolved": order.resolved.model_dump(mode="json"),
                    "code": CODE.dump_python(order.code, mode="json"),
                    "worker_module": order.worker_module,
                    "variables": meeting | variables,
                }
            )
        own = meeting | {NODE_VARIABLE: "0", NODE_NAME_VARIABLE: self._names[0]}
        return HostsJob(order, LocalJob(order, own), others, self._changed)

    def _welcome(self) -> None:
        """Take connections until the end; whoever does not know the key is sent away."""
        while not self._over:
            try:
                channel = Channel(self._listener.accept())
            except (AuthenticationError, EOFError, OSError):
                continue
            hello = channel.receive()
            problem = self._problem(hello)
            if hello is None:
                continue
            if problem:
                channel.send({"end": UsageError.exit_code, "why": problem})
                channel.close()
            with self._changed:
                if problem:
                    self._refused = problem
                else:
                    number = int(hello["number"])
                    host = self._others[number] = Host(self._names[number], channel)
                    channel.send({"welcome": number})
                    threading.Thread(target=self._listen, args=(host,), daemon=True).start()
                self._changed.notify_all()

    def _problem(self, hello: Message | None) -> str:
        if hello is None:
            return ""
        number, arguments = hello["number"], hello["arguments"]
        name = self._names[number] if 0 < number < len(self._names) else str(number)
        if name == str(number) or number in self._others:
            return f"host {name} has come twice: set {NODE_VARIABLE} to a number of its own on each"
        if arguments != self._arguments:
            return (
                f"host {name} was started with another command: {' '.join(arguments)!r} there,"
                f" {' '.join(self._arguments)!r} on {self._names[0]}; start the same on all hosts"
            )
        return ""

    def _listen(self, host: Host) -> None:
        """What a host says, until it is gone."""
        why = "its connection has ended"
        while (message := host.channel.receive()) is not None:
            why = message.get("left", why)
            with self._changed:
                if "ended" in message:
                    host.ends[message["ended"]] = message["code"]
                self._changed.notify_all()
        with self._changed:
            host.why = why
            if not self._over:
                self._lose(host)
            self._changed.notify_all()

    def _lose(self, host: Host) -> None:
        if self._stop is not None and not self._stop.is_set():
            self._stop.why = _lost(host)
            self._stop.set()


class HostsJob:
    """The agents of one run: this machine's, and one on each of `others`."""

    def __init__(
        self, order: Order, local: LocalJob, others: Sequence[Host], changed: threading.Condition
    ) -> None:
        self._order = order
        self._run = str(order.run_dir)
        self._local = local
        self._others = others
        self._changed = changed
        self._broken_seconds: float | None = None

    @property
    def id(self) -> str:
        """Process id of this machine's agent."""
        return self._local.id

    def wait(self, seconds: float) -> JobState:
        """Ended with all agents; or with the first that fails, a moment later."""
        local = self._local.wait(seconds)
        if local.phase == "ended":
            with self._changed:
                self._changed.wait_for(self._all_over, seconds)
        over = self._all_over() and local.phase == "ended"
        broken = self._first_failure(local)
        now = time.monotonic()
        if broken is not None and self._broken_seconds is None:
            self._broken_seconds = now
        late = self._broken_seconds is not None and now > self._broken_seconds + _LAST_WORDS_SECONDS
        if not over and not late:
            return JobState("running")
        return broken or local

    def _all_over(self) -> bool:
        return all(host.why is not None or self._run in host.ends for host in self._others)

    def _first_failure(self, local: JobState) -> JobState | None:
        if local.phase == "ended" and local.exit_code != 0:
            return local
        for host in self._others:
            if host.why is not None and self._run not in host.ends:
                return JobState("ended", _lost(host), 1, "interrupted")
            code = host.ends.get(self._run, 0)
            if code != 0:
                return JobState("ended", f"on {host.name}", code)
        return None

    def cancel(self, grace_seconds: float) -> None:
        """Here and on every other host."""
        for host in self._others:
            host.channel.send({"cancel": self._run, "grace_seconds": grace_seconds})
        self._local.cancel(grace_seconds)
        with self._changed:
            self._changed.wait_for(self._all_over, grace_seconds + _CANCEL_SECONDS)

    def symptoms(self) -> Symptoms:
        """Of this machine's processes, and where the others are."""
        seen, each = self._local.symptoms(), self._order.resolved.launch.ranks_per_node
        places = {
            rank: f"on {host.name}"
            for node, host in enumerate(self._others, start=1)
            for rank in range(node * each, (node + 1) * each)
        }
        return Symptoms({**seen.ranks, **places}, seen.agent, seen.load)

    def ask_for_stacks(self) -> None:
        """Here and on every other host."""
        self._local.ask_for_stacks()
        for host in self._others:
            host.channel.send({"stacks": self._run})


def _lost(host: Host) -> str:
    return f"host {host.name} was lost: {host.why}"


def _write_private(file: Path, text: str) -> None:
    """For the eyes of this user alone."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    draft.replace(file)
