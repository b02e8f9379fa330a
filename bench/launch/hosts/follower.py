"""Every host but the first: starts the agents that it is told to, and ends with the first host."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.errors import NothingMeasuredError, UsageError
from bench.launch.hosts.channel import Channel, Message
from bench.launch.hosts.leader import CODE
from bench.launch.hosts.meeting import MEETING, Ended, Meeting, read_meeting
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
        NothingMeasuredError: the first host was not found, is lost, or has ended with an error.
        UsageError: it has sent this host or another one away.
    """
    search = _Search(hosts[0], results, seconds, say)
    hello = {"number": number, "arguments": list(arguments), "process": secrets.token_hex(8)}
    found = search.meet(hello, stop)
    if isinstance(found, Ended):
        return _end_with(found, hosts[0], say)
    if found is None:
        return 130
    say(f"host {number} ({hosts[number]}): {hosts[0]} leads, and shows the runs")
    threading.Thread(target=_leave_on, args=(stop, found), daemon=True).start()
    jobs = _Jobs(found)
    try:
        while (message := found.receive()) is not None:
            if (end := _ended(message)) is not None:
                found.close()
                return _end_with(end, hosts[0], say)
            jobs.heed(message)
    finally:
        jobs.end(_GRACE_SECONDS)
    if stop.is_set():
        return 130
    raise NothingMeasuredError(
        f"{hosts[0]}, the first host, is gone without a word: what it has recorded is kept; start"
        " the same command again on all hosts, and only what is missing is run"
    )


def _ended(message: Message) -> Ended | None:
    if "end" not in message:
        return None
    return Ended(int(message["end"]), message.get("why", ""), time.time())


def _end_with(end: Ended, first: str, say: Callable[[str], None]) -> int:
    if not end.why:
        say(f"{first}, the first host, has ended with exit code {end.exit_code}")
        return end.exit_code
    kind = UsageError if end.exit_code == UsageError.exit_code else NothingMeasuredError
    raise kind(f"{first}, the first host, has ended: {end.why}")


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


@dataclass
class _Search:
    """For the first host, by what it writes into the results folder."""

    first: str
    results: Path
    seconds: float
    say: Callable[[str], None]

    def meet(self, hello: Message, stop: StopRequest) -> Channel | Ended | None:
        """A connection once it has taken this host; its end; None if `stop` was set first.

        Raises:
            NothingMeasuredError: not within `seconds`.
        """
        deadline = time.monotonic() + self.seconds
        told = None
        while not stop.wait(_LOOK_SECONDS):
            found = read_meeting(self.results)
            if isinstance(found, Meeting):
                answer = _greeted(found, hello)
                if answer is not None:
                    return answer
            elif isinstance(found, Ended):
                if found.ended_seconds > psutil.Process().create_time():
                    return found  # of the start that this one belongs to
                if found != told:
                    told = found
                    self.say(f"{self._before(found)}; waiting {self.seconds:g} s for a new start")
            if time.monotonic() > deadline:
                raise NothingMeasuredError(
                    f"{self.first}, the first host, was not found within {self.seconds:g} s:"
                    f" {self._trace(found)}. Start the same command on it, with a results folder"
                    " that all hosts share; --hosts-timeout waits longer"
                )
        return None

    def _before(self, end: Ended) -> str:
        ago = psutil.Process().create_time() - end.ended_seconds
        why = f": {end.why}" if end.why else ""
        code = end.exit_code
        return f"{self.first} ended {ago:.0f} s before this start, with exit code {code}{why}"

    def _trace(self, found: Meeting | Ended | None) -> str:
        """What there is of it."""
        file = self.results / MEETING
        if found is None:
            return f"expected {file}, which it writes, found none"
        if isinstance(found, Ended):
            return self._before(found)
        return (
            f"{file} leads to {found.address}:{found.port}, where it does not answer (it was"
            " killed, or that port cannot be reached)"
        )


def _greeted(meeting: Meeting, hello: Message) -> Channel | Ended | None:
    """What the first host answers; None where nobody does."""
    try:
        channel = Channel.called(meeting.address, meeting.port, bytes.fromhex(meeting.key))
    except (OSError, ValueError):
        return None
    channel.send(hello)
    answer = channel.receive()
    if answer is not None and "welcome" in answer:
        channel.limit_receiving(0)
        return channel
    channel.close()
    return None if answer is None else _ended(answer)
