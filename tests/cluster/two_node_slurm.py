"""A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd in one folder.

`with TwoNodeSlurm(folder) as slurm:` starts it in seconds and stops it without leftovers.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import optional
import psutil

NODES = ("n1", "n2")
_START_SECONDS = 30.0
# As many cores as a test asks for: nothing is bound to them.
_CPUS_PER_NODE = 4

_CONFIG = """\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000,\
bf_yield_interval=1000000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MaxArraySize=1001
ReturnToService=2
SlurmctldTimeout=5
SlurmdTimeout={slurmd_timeout}
InactiveLimit=0
KillWait=3
CompleteWait=0
MessageTimeout=10
MinJobAge=300
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmNotStartedError(Exception):
    """The daemons did not come up; the message holds the end of their logs."""


class TwoNodeSlurm:
    """The daemons, in `folder` (a short path: sockets live in it)."""

    def __init__(self, folder: Path, *, slurmd_timeout_seconds: int = 10) -> None:
        self.folder = folder
        ports = _free_ports(1 + len(NODES))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = socket.gethostname()
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={_CPUS_PER_NODE} RealMemory=2000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=folder,
                host=host,
                user=getpass.getuser(),
                controller_port=ports[0],
                slurmd_timeout=slurmd_timeout_seconds,
                nodes="\n".join(nodes),
            )
        )
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)

    def __enter__(self) -> Self:
        try:
            self._start_munge()
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            self.wait_until(lambda: self.node_states() == {"idle"}, "two idle nodes")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_munge(self) -> None:
        # --force: a folder below /tmp counts as insecure, and is good enough for one machine.
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )
        socket_file = self.folder / "munge.socket"
        self.wait_until(socket_file.exists, "the socket of munged")

    def start_controller(self) -> None:
        """Start slurmctld; after `kill` it reads back its own state."""
        self._start("slurmctld", "-D")
        self.wait_until(self._answers, "an answer of slurmctld")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End one daemon: `slurmctld`, or a node's slurmd. What it has started lives on."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(20)

    def crash_node(self, node: str) -> None:
        """As if the power of a node was cut: its slurmd, and everything that it has started."""
        self.kill(node)
        for process in self._of_node(node):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def stop(self) -> None:
        """End every job and every daemon; returns when nothing is left."""
        for name in [*NODES, "slurmctld", "munged"]:
            if name in self._daemons:
                self.kill(name)
        left = [
            process
            for process, environment in self._ours()
            if "SLURMD_NODENAME" in environment or process.name() == "slurmstepd"
        ]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def _of_node(self, node: str) -> list[psutil.Process]:
        """Everything that a node has started: tasks by their environment, and who started those."""
        found: set[psutil.Process] = set()
        for process, environment in self._ours():
            with contextlib.suppress(psutil.Error):
                if environment.get("SLURMD_NODENAME") == node:
                    parent = process.parent()
                    by_step = parent is not None and parent.name() == "slurmstepd"
                    found |= {process, parent} if parent is not None and by_step else {process}
        return list(found)

    def tasks(self) -> list[psutil.Process]:
        """Processes of jobs that live."""
        return [one for node in NODES for one in self._of_node(node) if one.is_running()]

    def _ours(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Processes of this cluster, and their environments."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    yield process, environment

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        path = optional.program(program)
        if path is None:
            raise SlurmNotStartedError(f"{program} is not installed")
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def command(self, *arguments: str) -> str:
        """Output of a Slurm command against this cluster."""
        done = subprocess.run(
            arguments,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def node_states(self) -> set[str]:
        """States of the two nodes, each once."""
        return set(self.command("sinfo", "-h", "-N", "-o", "%t").split())

    def jobs(self, state: str = "pending,running,completing") -> list[str]:
        """Ids of the jobs in these states."""
        return self.command("squeue", "-h", "-r", "-t", state, "-o", "%i").split()

    def _answers(self) -> bool:
        try:
            return "UP" in self.command("scontrol", "ping")
        except RuntimeError:
            return False

    def wait_until(
        self, condition: Callable[[], bool], what: str, seconds: float = _START_SECONDS
    ) -> None:
        """Poll until `condition` holds."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):
                if condition():
                    return
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} ended" if dead else f"not within {seconds:g} s"
                raise SlurmNotStartedError(f"expected {what}; {why}:\n{self._log_ends()}")
            time.sleep(0.1)

    def _log_ends(self) -> str:
        ends = []
        for file in [*self.folder.glob("*.out"), *self.folder.glob("*.log")]:
            lines = file.read_text(errors="replace").splitlines()[-5:]
            ends += [f"{file.name}: {line}" for line in lines]
        return "\n".join(ends)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
