"""Every host but the first: starts the agents that it is told to, and ends with the first host."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

from bench.errors import NothingMeasuredError, UsageError
from bench.launch.hosts.channel import Channel, Message
from bench.launch.hosts.leader import CODE, MEETING
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import Order
from bench.launch.stop_request import StopRequest
from bench.spec import ResolvedRun

_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 3.0


def follow(
    hosts: Sequence[str],
    number: int,
    results: Path,
    arguments: Sequence[str],
    *,
    seconds: float,
    stop: StopRequest,
    say: Callable[[str], None],
) -> int:
    """Do what the first host says, until it ends; the exit code that it ends with.

    Args:
        hosts: all of them.
        number: of this one.
        results: the results folder, shared with the first host.
        arguments: of the command line.
        seconds: how long to wait for the first host.
        stop: set it to leave: the first host then stops the sweep.
        say: takes lines for people.

    Raises:
        NothingMeasuredError: the first host was not found, or is lost.
        UsageError: it has sent this one away.
    """
    channel = _meet(hosts, results, seconds, stop)
    if channel is None:
        return 130
    channel.send({"number": number, "arguments": list(arguments)})
    threading.Thread(target=_leave_on, args=(stop, channel), daemon=True).start()
    jobs = _Jobs(channel)
    try:
        while (message := channel.receive()) is not None:
            if "end" in message:
                if message.get("why"):
                    raise UsageError(message["why"])
                return int(message["end"])
            if "welcome" in message:
                say(f"host {number} ({hosts[number]}): {hosts[0]} leads, and shows the runs")
            jobs.heed(message)
    finally:
        jobs.end(_GRACE_SECONDS)
    if stop.is_set():
        return 130
    raise NothingMeasuredError(
        f"{hosts[0]}, the first host, is gone without a word: what it has recorded is kept; start"
        " the same command again on all hosts, and only what is missing is run"
    )


class _Jobs:
    """The agent of the run that is going on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._job: LocalJob | None = None
        self._run = ""

    def heed(self, message: Message) -> None:
        if "start" in message:
            self.end(0.0)
            self._start(message)
        elif self._job is not None and message.get("cancel") == self._run:
            self.end(float(message["grace_seconds"]))
        elif self._job is not None and message.get("stacks") == self._run:
            self._job.ask_for_stacks()

    def end(self, grace_seconds: float) -> None:
        if self._job is not None:
            self._job.cancel(grace_seconds)

    def _start(self, message: Message) -> None:
        self._run = message["start"]
        order = Order(
            ResolvedRun.model_validate(message["resolved"]),
            Path(self._run),
            CODE.validate_python(message["code"]),
            message["worker_module"],
        )
        try:
            job = self._job = LocalJob(order, message["variables"])
        except OSError as error:
            self._channel.send({"left": f"it cannot start the ranks of {self._run}: {error}"})
            self._channel.close()
            return
        threading.Thread(target=self._report, args=(job, self._run), daemon=True).start()

    def _report(self, job: LocalJob, run: str) -> None:
        while (state := job.wait(60.0)).phase != "ended":
            pass
        self._channel.send({"ended": run, "code": state.exit_code})


def _leave_on(stop: StopRequest, channel: Channel) -> None:
    stop.wait()
    channel.send({"left": stop.why})
    channel.close()


def _meet(hosts: Sequence[str], results: Path, seconds: float, stop: StopRequest) -> Channel | None:
    """A connection to the first host, once it is there; None if `stop` was set first."""
    deadline = time.monotonic() + seconds
    while not stop.wait(_LOOK_SECONDS):
        # What a first host has left behind that was killed leads nowhere, until a new one comes.
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, AuthenticationError):
            meeting = json.loads((results / MEETING).read_text())
            place = meeting["address"], int(meeting["port"])
            return Channel(Client(place, authkey=bytes.fromhex(meeting["key"])))
        if time.monotonic() > deadline:
            raise NothingMeasuredError(
                f"{hosts[0]}, the first host, was not found within {seconds:g} s: expected"
                f" {results / MEETING} and an open port there. Start the same command on it, with a"
                " results folder that all hosts share; --hosts-timeout waits longer"
            )
    return None
