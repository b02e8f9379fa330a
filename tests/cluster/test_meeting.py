"""How hosts meet, and what a host is told that comes late, twice or wrongly; threads for hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.errors import BenchError, NothingMeasuredError, UsageError
from bench.launch.hosts import channel
from bench.launch.hosts.follower import follow
from bench.launch.hosts.leader import Leader
from bench.launch.hosts.meeting import Ended, Meeting, read_meeting, write_meeting
from bench.launch.stop_request import StopRequest

pytestmark = pytest.mark.timeout(60)

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
RUN = ["run", "two.yaml"]


class Others:
    """Hosts that follow, each in a thread."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.stops: list[StopRequest] = []
        self.said: list[str] = []
        self._pool = ThreadPoolExecutor(8)

    def come(
        self, number: int, arguments: list[str] = RUN, *, seconds: float = 20.0
    ) -> Future[int]:
        stop = StopRequest()
        self.stops.append(stop)
        return self._pool.submit(
            follow,
            HOSTS,
            number,
            self.results,
            arguments,
            seconds=seconds,
            stop=stop,
            say=self.said.append,
        )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while not any(text in line for line in self.said):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def leave(self) -> None:
        for stop in self.stops:
            stop.set()
        self._pool.shutdown()


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    monkeypatch.setattr("bench.launch.hosts.follower._LOOK_SECONDS", 0.02)
    found = Others(tmp_path)
    yield found
    found.leave()


def leader(results: Path, count: int = 2) -> Leader:
    return Leader(HOSTS[:count], results, RUN)


def why(future: Future[int], kind: type[BenchError]) -> str:
    with pytest.raises(kind) as raised:
        future.result(20)
    return str(raised.value)


def test_all_end_with_the_exit_code_of_the_first(tmp_path: Path, others: Others) -> None:
    with leader(tmp_path, 3) as first:
        codes = [others.come(1), others.come(2)]
        first.meet(20, StopRequest())
        first.ended(1)
    assert [code.result(20) for code in codes] == [1, 1]
    assert "127.0.0.1, the first host, has ended with exit code 1" in others.said
    assert others.come(1).result(20) == 1, "also one that comes late"


def test_who_is_refused_ends_all_and_all_are_told_why(tmp_path: Path, others: Others) -> None:
    said = "host 127.0.0.3 was started with another command: 'run two.yaml --force' there"
    good = others.come(1)
    refused = []

    def lead() -> None:
        with leader(tmp_path, 3) as first:
            others.wait_for("127.0.0.1 leads")
            refused.append(others.come(2, [*RUN, "--force"]))
            first.meet(20, StopRequest())

    with pytest.raises(UsageError, match=said):
        lead()
    assert said in why(good, UsageError)
    assert said in why(refused[0], UsageError)
    assert said in why(others.come(1), UsageError), "also one that comes late"


def test_who_does_not_come_is_named_to_all(tmp_path: Path, others: Others) -> None:
    good = others.come(1)
    said = "1 of 3 hosts have not come within 0.1 s: 127.0.0.3"

    def lead() -> None:
        with leader(tmp_path, 3) as first:
            others.wait_for("127.0.0.1 leads")
            first.meet(0.1, StopRequest())

    with pytest.raises(NothingMeasuredError, match=said):
        lead()
    assert said in why(good, NothingMeasuredError)


def test_a_stranger_that_says_nothing_holds_nobody_up(tmp_path: Path, others: Others) -> None:
    with leader(tmp_path) as first:
        meeting = read_meeting(tmp_path)
        assert isinstance(meeting, Meeting)
        with socket.create_connection((meeting.address, meeting.port)) as stranger:
            code = others.come(1)
            first.meet(10, StopRequest())
            stranger.sendall(b"\0\0\0\x05hello")
            first.ended(0)
    assert code.result(20) == 0


def test_something_else_on_the_port_of_a_killed_host_does_not_block(
    tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_meeting(tmp_path, Meeting("127.0.0.1", silent.getsockname()[1], "ab" * 32))
        told = why(others.come(1, seconds=0.5), NothingMeasuredError)
    assert "was not found within 0.5 s" in told
    assert "where it does not answer" in told


def test_nobody_is_taken_after_the_end(tmp_path: Path) -> None:
    with leader(tmp_path) as first:
        meeting = read_meeting(tmp_path)
        assert isinstance(meeting, Meeting)
        first.ended(0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((meeting.address, meeting.port), 5)


def test_an_earlier_end_is_told_and_the_next_start_is_met(tmp_path: Path, others: Others) -> None:
    write_meeting(tmp_path, Ended(2, "host b was wrong", ended_seconds=0.0))
    assert "with exit code 2: host b was wrong" in why(
        others.come(1, seconds=0.1), NothingMeasuredError
    )
    code = others.come(1)
    others.wait_for("with exit code 2: host b was wrong; waiting 20 s for a new start")
    with leader(tmp_path) as first:
        first.meet(20, StopRequest())
        first.ended(0)
    assert code.result(20) == 0


def test_a_host_that_left_before_the_sweep_may_come_again(tmp_path: Path, others: Others) -> None:
    with leader(tmp_path, 3) as first:
        left = others.come(1)
        others.wait_for("host 1 (127.0.0.2): 127.0.0.1 leads")
        others.stops[0].set()
        assert left.result(20) == 130
        again, third = others.come(1), others.come(2)
        first.meet(20, StopRequest())
        late = why(others.come(2), UsageError)
        first.ended(0)
    assert [again.result(20), third.result(20)] == [0, 0]
    assert "host 127.0.0.3 has come twice" in late


def test_a_host_that_is_lost_and_comes_again_is_told(tmp_path: Path, others: Others) -> None:
    stop = StopRequest()
    with leader(tmp_path) as first:
        others.come(1)
        first.meet(20, StopRequest())
        first.stop_if_lost(stop)
        others.stops[0].why = "its power was cut"
        others.stops[0].set()
        assert stop.wait(20)
        told = why(others.come(1), NothingMeasuredError)
    assert "host 127.0.0.2 was lost: its power was cut: start the same command again" in told
    assert stop.why == "host 127.0.0.2 was lost: its power was cut"


def test_a_first_host_that_is_stopped_meets_nobody(tmp_path: Path) -> None:
    stop = StopRequest()
    threading.Timer(0.1, stop.set).start()
    with leader(tmp_path) as first:
        first.meet(60, stop)
        first.ended(130)
    assert isinstance(found := read_meeting(tmp_path), Ended)
    assert found.exit_code == 130
