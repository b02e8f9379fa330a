"""`Leader`: the first host. It decides what is run, and has the others start their agents.

torchrun's own rendezvous brings the agents together, run by run; its port and a free one for the
orders are the first host's. Where the orders are taken stands in the results folder, which all
hosts share, with a key that nobody else can read.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from bench.errors import BenchError, NothingMeasuredError, UsageError
from bench.launch.hosts.channel import Channel, Message
from bench.launch.hosts.job import Host, HostsJob
from bench.launch.hosts.meeting import Ended, Meeting, write_meeting
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import Job, Order
from bench.launch.rank_code import RankCode
from bench.launch.rendezvous import NODE_NAME_VARIABLE, NODE_VARIABLE, Rendezvous
from bench.launch.stop_request import StopRequest

CODE: TypeAdapter[RankCode] = TypeAdapter(RankCode)
_LOOK_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0


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
        self._results = results
        self._others: dict[int, Host] = {}
        self._refused = ""
        self._changed = threading.Condition()
        self._stop: StopRequest | None = None
        self._met = False
        self._over = False
        self._end: Message = {"end": NothingMeasuredError.exit_code}

    def __enter__(self) -> Self:
        key = secrets.token_bytes(32)
        self._listener = _listener(len(self._names))
        port = int(self._listener.getsockname()[1])
        write_meeting(self._results, Meeting(self._names[0], port, key.hex()))
        threading.Thread(target=self._accept, args=(key,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell all who are there, and leave word for those who come late."""
        with self._changed:
            if isinstance(error, KeyboardInterrupt):
                self._end = {"end": 130}
            elif error is not None:
                code = error.exit_code if isinstance(error, BenchError) else self._end["end"]
                self._end = {"end": code, "why": str(error) or type(error).__name__}
            self._over = True
            hosts = list(self._others.values())
            for host in hosts:
                host.channel.last(self._end)
        why = self._end.get("why", "")
        with contextlib.suppress(OSError):
            write_meeting(self._results, Ended(self._end["end"], why, time.time()))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone ends no accept()
        self._listener.close()
        with self._changed:
            self._changed.wait_for(lambda: all(one.lost for one in hosts), _FAREWELL_SECONDS)
        for host in hosts:
            host.channel.close()

    def ended(self, code: int) -> None:
        """What the others are told: the exit code of this command."""
        self._end = {"end": code}

    def meet(self, seconds: float, stop: threading.Event) -> None:
        """Wait for every other host, or until `stop` is set.

        Raises:
            NothingMeasuredError: some have not come in time.
            UsageError: one came with another command.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._absent() and not self._refused and not stop.is_set():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK_SECONDS))
            absent = self._absent()
            self._met = not absent
        if self._refused:
            raise UsageError(self._refused)
        if absent and not stop.is_set():
            raise NothingMeasuredError(
                f"{len(absent)} of {len(self._names)} hosts have not come within {seconds:g} s:"
                f" {', '.join(absent)}. Start the same command there, with"
                f" the same results folder ({self._results}); --hosts-timeout waits longer"
            )

    def _absent(self) -> list[str]:
        there = {number for number, host in self._others.items() if not host.lost}
        return [name for number, name in enumerate(self._names) if number not in {0, *there}]

    def stop_if_lost(self, stop: StopRequest) -> None:
        """Set `stop` once a host is lost: no run can go on, and none be started."""
        self._stop = stop
        for host in self._others.values():
            if host.lost:
                self._lose(host)

    @property
    def lost(self) -> str:
        """Why the hosts cannot go on; empty while they can."""
        return next((host.lost for host in self._others.values() if host.lost), "")

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

    def _accept(self, key: bytes) -> None:
        """Take connections until the end. Nobody who is slow, or silent, holds up the others."""
        while not self._over:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # one that was given up at once, or the end
                continue
            threading.Thread(target=self._greet, args=(connected, key), daemon=True).start()

    def _greet(self, connected: socket.socket, key: bytes) -> None:
        """Who does not know the key is sent away, whom we cannot use is told why."""
        try:
            channel = Channel.accepted(connected, key)
        except OSError:
            return
        hello = channel.receive()
        if hello is not None:
            with self._changed:
                refused = self._refusal(hello)
                if refused:
                    channel.last(refused)
                else:
                    host = self._take(hello, channel)
                self._changed.notify_all()
            if not refused:
                self._listen(host)
            while channel.receive() is not None:
                pass
        channel.close()

    def _take(self, hello: Message, channel: Channel) -> Host:
        number = int(hello["number"])
        if number in self._others:
            self._others[number].channel.close()
        host = self._others[number] = Host(self._names[number], channel, hello["process"])
        channel.limit_receiving(0)
        channel.send({"welcome": number})
        return host

    def _refusal(self, hello: Message) -> Message | None:
        """What a host is told that is not taken. Before all are there, it is the end of all."""
        if self._over:
            return self._end
        problem = self._problem(hello)
        if problem and not self._met:
            self._refused = problem
        if problem:
            return {"end": UsageError.exit_code, "why": problem}
        if self._met:
            said = ("the sweep was begun without this process", self.lost)
            why = f"{'; '.join(filter(None, said))}: start the same command again on all hosts"
            return {"end": NothingMeasuredError.exit_code, "why": why}
        return None

    def _problem(self, hello: Message) -> str:
        number, arguments = hello["number"], hello["arguments"]
        name = self._names[number] if 0 < number < len(self._names) else str(number)
        before = self._others.get(number)
        twice = before is not None and not before.lost and before.process != hello["process"]
        if name == str(number) or twice:
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
            if not self._over and host in self._others.values():
                self._lose(host)
            self._changed.notify_all()

    def _lose(self, host: Host) -> None:
        if self._stop is not None and not self._stop.is_set():
            self._stop.why = host.lost
            self._stop.set()


def _listener(hosts: int) -> socket.socket:
    """On a port of the kernel's choice, of IPv4 and IPv6 where there are both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=hosts, dualstack_ipv6=both)
