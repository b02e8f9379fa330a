"""`--launcher command`: a template starts the agents of a run; here two hosts are one machine."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from command_line import CommandLine, wait_for
from optional import program

from bench.errors import UsageError
from bench.launch import command_launcher
from bench.launch.code import own_code
from bench.launch.command_launcher import CommandJob, checked_template, read_hosts
from bench.launch.protocol import Order
from bench.record import FINISHED_GOOD, RunRecord
from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec

HOSTS = ("127.0.0.1", "127.0.0.2")
#: Starts a command here, whatever the host is called.
HERE = "env HOST={host} {command}"
SWEEP = """\
name: two
base:
  model: {preset: debug}
  train: {global_batch: 4, micro_batch: 1, seq_len: 16, steps: STEPS}
  launch: {ranks: 2, nodes: NODES}
  engine: {name: mfsdp}
"""


class Sweep(CommandLine):
    """A sweep of one run in a folder of its own."""

    process: subprocess.Popen[str] | None = None

    def begin(self, template: str, *, steps: int = 6, nodes: int = 2) -> None:
        (self.folder / "hosts").write_text("\n".join(HOSTS))
        path = self.sweep(SWEEP.replace("STEPS", str(steps)).replace("NODES", str(nodes)))
        options = ["--launcher", "command", "--launcher-option", "hosts=hosts"]
        options += ["--launcher-option", f"command={template}"]
        self.process = self.start("run", path, *options)

    def ended(self) -> tuple[int, str, RunRecord]:
        _, err = self.process.communicate(timeout=200)
        [record] = self.records()
        return self.process.returncode, err, record


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    found = Sweep(tmp_path)
    yield found
    if found.process is not None:  # not where another fixture skipped
        found.process.kill()
        found.process.communicate()
    for process in found.alive():
        process.kill()


def answers(address: tuple[str, int]) -> bool:
    with socket.socket() as client:
        return client.connect_ex(address) == 0


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """A template for two real SSH servers, one per address, of a user's own."""
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        port = probe.getsockname()[1]
    keys = tmp_path / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(command, check=True)
    Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None
    servers = []
    for address in HOSTS:
        settings = f"Port {port}\nListenAddress {address}\nHostKey {keys}/host\nPidFile none\n"
        settings += f"AuthorizedKeysFile {keys}/user.pub\nStrictModes no\nUsePAM no\n"
        config = keys / f"sshd.{address}"
        config.write_text(settings)
        command = [program("sshd"), "-D", "-f", str(config), "-E", str(keys / f"log.{address}")]
        servers.append(subprocess.Popen(command))
    config = keys / "config"
    config.write_text(
        f"Host 127.*\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {keys}/user\n"
        "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    )
    for address in HOSTS:
        wait_for(partial(answers, (address, port)), f"the server of {address}")
    yield f"ssh -F {config} -o BatchMode=yes {{host}} {{command}}"
    for server in servers:
        server.kill()
        server.wait()


@pytest.mark.needs("sshd")
@pytest.mark.processes
def test_two_ssh_servers_make_a_run_together(sweep: Sweep, ssh: str) -> None:
    sweep.begin(ssh)
    _, err, record = sweep.ended()
    assert record.status.state in FINISHED_GOOD, err  # a busy machine may make it unsteady
    assert record.placement is not None
    assert record.placement.nodes == HOSTS
    assert len(record.losses) == 6
    assert not sweep.alive()


# Daily where a command cannot reach its host, below.
@pytest.mark.nightly
@pytest.mark.needs("sshd")
@pytest.mark.processes
def test_a_connection_that_is_lost_ends_the_run_on_both_hosts(sweep: Sweep, ssh: str) -> None:
    sweep.begin(ssh, steps=1_000_000)
    sweep.wait_for_steps()
    clients = [
        one for one in psutil.Process(sweep.process.pid).children() if "127.0.0.2" in one.cmdline()
    ]
    [client] = clients
    client.kill()
    code, err, record = sweep.ended()
    assert (code, record.status.state) == (3, "interrupted"), err
    assert record.status.reason.startswith("host 127.0.0.2 was lost: the command for 127.0.0.2")
    assert not sweep.alive()


# Daily on this machine: tests/run/faults/test_faults.py.
@pytest.mark.nightly
@pytest.mark.processes
def test_ctrl_c_ends_the_ranks_on_all_hosts(sweep: Sweep) -> None:
    sweep.begin(HERE, steps=1_000_000)
    sweep.wait_for_steps()
    sweep.process.send_signal(signal.SIGINT)
    code, err, record = sweep.ended()
    assert (code, record.status.state) == (130, "interrupted"), err
    assert not sweep.alive()
    assert not list(sweep.folder.rglob("launcher.*"))


@pytest.mark.processes
def test_a_command_that_cannot_reach_its_host_is_quoted(sweep: Sweep) -> None:
    sweep.begin("sh -c 'echo no route to {host} >&2; exit 255' {command}", nodes=1)
    code, err, record = sweep.ended()
    assert (code, record.status.state) == (3, "interrupted"), err
    said = "host 127.0.0.1 was lost: the command for 127.0.0.1 ended with exit code 255"
    assert record.status.reason.startswith(f"{said}: no route to 127.0.0.1")


# Daily two servers, above; who has which number is told in test_rendezvous.py.
@pytest.mark.nightly
@pytest.mark.processes
def test_one_command_for_all_hosts_gives_each_node_its_number(sweep: Sweep) -> None:
    start = sweep.folder / "start_all"
    start.write_text(
        '#!/bin/sh\n[ "$1" = 127.0.0.1,127.0.0.2 ] || exit 9\nshift\n'
        'for node in 0 1; do OMPI_COMM_WORLD_RANK=$node "$@" & pids="$pids $!"; done\n'
        "for pid in $pids; do wait $pid || exit 1; done\n"
    )
    start.chmod(0o755)
    sweep.begin(f"{start} {{hosts}} {{command}}")
    _, err, record = sweep.ended()
    assert record.status.state in FINISHED_GOOD, err  # a busy machine may make it unsteady
    assert record.placement is not None
    assert record.placement.nodes == HOSTS


@pytest.mark.parametrize(
    "template",
    ["ssh {host}", "{command}", "ssh {host} 'nice {command}'", "x {host} {hosts} {command}", "'"],
)
def test_a_template_that_cannot_start_anything_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="--launcher-option command="):
        checked_template(template)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# none\n", "^--launcher-option hosts=.*expected a host per line, found none"),
        ("a\nb slots=8\na # again\n", "a stands there more than once"),
    ],
)
def test_a_file_of_hosts_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_hosts(tmp_path / "hosts")


def test_a_command_that_ends_between_two_looks_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        pid = 0
        looks = iter([None])

        def poll(self) -> int | None:
            return next(self.looks, 255)

        def wait(self, _seconds: float) -> int:
            return 255

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.log").write_text("no route\n")
    monkeypatch.setattr(command_launcher, "start_detached", lambda *_: Client())
    order = Order(resolve_anywhere(RunSpec()), tmp_path, own_code(), "worker")
    job = CommandJob(order, ["far"], {"far": ["ssh"]})
    end = job.wait(30.0)
    job._over.set()
    assert (end.phase, end.state, end.exit_code) == ("ended", "interrupted", 255)
    assert "no route" in end.detail
