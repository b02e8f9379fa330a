"""`--launcher torchrun --hosts FILE`: one command on every host; here two hosts are one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench.errors import UsageError
from bench.launch.hosts.channel import Channel
from bench.launch.hosts.hosts_file import own_number, read_hosts
from bench.launch.hosts.job import Host, HostsJob
from bench.launch.hosts.meeting import Ended, Meeting, read_meeting
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import JobState, Order
from bench.launch.rendezvous import NODE_VARIABLE
from bench.record import FINISHED_GOOD, RunRecord
from bench.store import ResultsStore

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CHECKOUT = Path(__file__).parents[2]
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SWEEP = """\
name: two
base:
  model: {preset: debug}
  train: {global_batch: 4, micro_batch: 1, seq_len: 16}
  launch: {ranks: 2, nodes: 2}
matrix:
  zip: [{engine.name: [ddp, mfsdp], train.steps: [8, 1000000]}]
"""


class Hosts:
    """Command lines, each on a host of its own as far as it knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "two.yaml").write_text(SWEEP)

    def start(self, number: int, *options: str, count: int = 2) -> subprocess.Popen[str]:
        file, names = self.folder / "hosts", "\n".join(HOSTS[:count])
        if not file.exists() or file.read_text() != names:  # another host may be reading it
            file.write_text(names)
        command = ["run", "two.yaml", "--launcher", "torchrun", "--hosts", "hosts", *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", *command],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT), NODE_VARIABLE: str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def records(self) -> list[RunRecord]:
        return list(ResultsStore.open(self.folder / "results", create=True).records())

    def wait_for_steps(self, runs: int) -> None:
        deadline = time.monotonic() + 120
        while sum(len(record.losses) > 1 for record in self.records()) < runs:
            assert time.monotonic() < deadline, [p.communicate() for p in self.started if p.poll()]
            time.sleep(0.3)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=90)
    return process.returncode, err


def test_hosts_make_runs_together_until_one_dies(hosts: Hosts) -> None:
    first, second = hosts.start(0), hosts.start(1)
    hosts.wait_for_steps(runs=2)
    second.send_signal(signal.SIGKILL)
    code, err = ended(first)

    good, lost = hosts.records()
    assert good.status.state in FINISHED_GOOD, err
    assert good.placement is not None
    assert good.placement.nodes == HOSTS[:2]
    assert len(good.losses) == 8
    assert (lost.status.state, code) == ("interrupted", 3), err
    assert "host 127.0.0.2 was lost" in lost.status.reason
    assert "start the same command again on all hosts" in err
    assert isinstance(read_meeting(hosts.folder / "results"), Ended)


@pytest.mark.nightly  # test_meeting.py asks the same of threads
def test_a_host_that_never_comes_is_named_and_a_stranger_is_sent_away(hosts: Hosts) -> None:
    first = hosts.start(0, "--hosts-timeout", "10", count=3)
    second = hosts.start(1, "--hosts-timeout", "10", count=3)
    while (meeting := read_meeting(hosts.folder / "results")) is None:
        time.sleep(0.05)
    assert isinstance(meeting, Meeting)
    with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
        stranger.sendall(b"\0\0\0\x05hello")
    code, err = ended(first)
    other = ended(second)
    assert (code, other[0]) == (3, 3), other
    assert "1 of 3 hosts have not come within 10 s: 127.0.0.3" in err
    assert not hosts.records()


@pytest.mark.nightly  # test_meeting.py asks the same of threads
def test_a_first_host_that_dies_or_never_comes_ends_the_others(hosts: Hosts) -> None:
    first = hosts.start(0, count=3)
    second = hosts.start(1, count=3)
    assert second.stderr is not None
    assert "127.0.0.1 leads" in second.stderr.readline()
    first.send_signal(signal.SIGKILL)
    code, err = ended(second)
    assert code == 3
    assert "the first host, is gone without a word" in err

    # Its key is left behind, and leads nowhere.
    assert (hosts.folder / "results" / "hosts.json").stat().st_mode & 0o077 == 0
    code, err = ended(hosts.start(1, "--hosts-timeout", "1"))
    assert code == 3
    assert "127.0.0.1, the first host, was not found within 1 s" in err


@pytest.mark.nightly
def test_ctrl_c_on_the_first_host_ends_all(hosts: Hosts) -> None:
    first = hosts.start(0, count=3)
    second = hosts.start(1, count=3)
    assert second.stderr is not None
    second.stderr.readline()
    first.send_signal(signal.SIGINT)
    assert {ended(first)[0], ended(second)[0]} == {130}


def test_another_command_on_one_host_is_refused_on_all(hosts: Hosts) -> None:
    first = hosts.start(0, "--hosts-timeout", "30")
    second = hosts.start(1, "--hosts-timeout", "30", "--force")
    found = [ended(first), ended(second)]
    assert [code for code, _ in found] == [2, 2], found
    assert all("host 127.0.0.2 was started with another command" in err for _, err in found)


def test_the_agent_of_another_host_that_fails_ends_the_run_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.launch.hosts.job._LAST_WORDS_SECONDS", 0.0)
    local, changed = Mock(LocalJob), threading.Condition()
    local.wait.return_value = JobState("running")
    others = [Host(name, Mock(Channel)) for name in ("b", "c")]
    job = HostsJob(Mock(Order, run_dir=Path("/r")), local, others, changed)
    assert job.wait(0.01).phase == "running"
    others[1].ends["/r"] = -9
    job.wait(0.01)
    assert job.wait(0.01) == JobState("ended", "on c", -9)

    others[1].ends["/r"] = others[0].ends["/r"] = 0
    assert job.wait(0.01).phase == "running", "this machine's own ranks are not over"
    local.wait.return_value = JobState("ended", exit_code=0)
    assert job.wait(0.01) == JobState("ended", exit_code=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n", "expected two hosts or more, one per line, found 1"),
        ("a\nb slots=8\na # again\n", "a stands there more than once"),
    ],
)
def test_a_file_of_hosts_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_hosts(tmp_path / "hosts")


def test_a_host_finds_itself_by_number_by_name_and_by_address() -> None:
    hosts = ("192.0.2.7", "127.0.0.5")
    assert own_number(hosts, {NODE_VARIABLE: "0"}) == 0
    assert own_number((*hosts, socket.gethostname()), {}) == 2
    assert own_number(hosts, {}) == 1
    for found, says in ((("192.0.2.7", "192.0.2.8"), "none of"), (HOSTS, "more than one")):
        with pytest.raises(UsageError, match=f"{says}.*set {NODE_VARIABLE}"):
            own_number(found, {})
    with pytest.raises(UsageError, match="expected the number of a host, 0 to 1"):
        own_number(hosts, {NODE_VARIABLE: "2"})
