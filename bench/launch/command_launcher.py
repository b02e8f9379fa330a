"""`CommandLauncher`: a command of somebody's own starts the agent of each node of a run.

The command comes from a template, as `ssh {host} {command}` or `mpirun --host {hosts} {command}`.
torchrun's own rendezvous brings the agents together; the first host is where they meet. The run
folder, which all hosts see, holds the script that they run, and how they ended.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.errors import UsageError
from bench.launch.agent import OUTCOME_FILE, node_file
from bench.launch.command import agent_command, launch_variables
from bench.launch.local.launcher import AGENT_LOG
from bench.launch.local.process_tree import end_run, start_detached
from bench.launch.protocol import JobState, Order, Symptoms
from bench.launch.remote_end import SIGN_OF_LIFE_SECONDS, WATCHED_VARIABLE, RunFiles
from bench.launch.rendezvous import NODE_NAME_VARIABLE, NODE_VARIABLE, Rendezvous
from bench.store.layout import LOGS
from bench.store.reading import read_json_object

_OPTION: Final = "--launcher-option"
SSH: Final = "ssh -o BatchMode=yes {host} {command}"
# Ranks elsewhere notice a failed one by themselves, and say more about it than their end does.
_LAST_WORDS_SECONDS: Final = 5.0
_END_SECONDS: Final = 15.0
_KILLED: Final = 128 + 9
_PORTS: Final = (20_000, 32_000)
#: Of the environment here, what is for the ranks: all else is each host's own.
_HANDED_DOWN: Final = re.compile(r"PYTHONPATH|(NCCL|GLOO|TORCH)_\w+")
_PLAIN: Final = re.compile(r"[\w./+@=:,-]+")
_NODE_NUMBER: Final = """\
case "$1" in
  ''|*[!0-9]*) node="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-${SLURM_PROCID:?}}}}" ;;
  *) node="$1" ;;
esac
"""


def checked_template(template: str) -> list[str]:
    """The words of a template.

    Raises:
        UsageError: it names no host or no command, or both {host} and {hosts}.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"{_OPTION} command={template!r}: {error}") from error
    hosts = sum(any(name in word for word in words) for name in ("{host}", "{hosts}"))
    if words.count("{command}") != 1 or hosts != 1 or words[0].startswith("{"):
        raise UsageError(
            f"{_OPTION} command={template!r}: expected a program with {{command}} as a word of its"
            " own, and either {host} (started once per node) or {hosts} (once for all), as in"
            " 'ssh {host} {command}'"
        )
    return words


def read_hosts(file: Path) -> tuple[str, ...]:
    """A host per line, by the name that starts it and that others reach it by; the first is node 0.

    `#` begins a comment. What follows a name (`slots=8` of other tools) is left out.

    Raises:
        UsageError: the file cannot be read, names no host, or one of them twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{_OPTION} hosts={file}: cannot be read: {error}") from error
    hosts = tuple(words[0] for line in lines if (words := line.partition("#")[0].split()))
    if not hosts:
        raise UsageError(f"{_OPTION} hosts={file}: expected a host per line, found none")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UsageError(f"{_OPTION} hosts={file}: {', '.join(twice)} stands there more than once")
    return hosts


class CommandLauncher:
    """Runs on `hosts`, the first ones of them, one run at a time.

    Args:
        hosts: as the template wants them, and as the others reach the first.
        template: how a command is started there.
    """

    def __init__(self, hosts: Sequence[str], template: str = SSH) -> None:
        self._hosts = tuple(hosts)
        self._words = checked_template(template)

    def start(self, order: Order) -> CommandJob:
        """Start an agent on every node of the run.

        Raises:
            UsageError: the run folder has a name that a remote shell would read otherwise.
        """
        hosts = self._hosts[: order.resolved.launch.nodes]
        script = _write_script(order, hosts)
        if _PLAIN.fullmatch(str(script)) is None:
            raise UsageError(
                f"{script}: expected a results folder whose path has letters, digits and ./+@=:,-_"
                " alone, as a shell on another host reads it; name another one with --results"
            )
        if any("{hosts}" in word for word in self._words):
            # pdsh puts the number of a node in the place of %n; others set a variable.
            commands = {",".join(hosts): self._command(",".join(hosts), script, "%n", len(hosts))}
        else:
            commands = {
                host: self._command(host, script, str(node), len(hosts))
                for node, host in enumerate(hosts)
            }
        return CommandJob(order, hosts, commands)

    def _command(self, host: str, script: Path, node: str, nodes: int) -> list[str]:
        words: list[str] = []
        for word in self._words:
            if word == "{command}":
                words += ["sh", str(script), node]
            else:
                named = word.replace("{hosts}", host).replace("{host}", host)
                words.append(named.replace("{nodes}", str(nodes)))
        return words


def _write_script(order: Order, hosts: Sequence[str]) -> Path:
    """What each node runs, with the number of the node as its argument."""
    launch = order.resolved.launch
    own = {name: value for name, value in os.environ.items() if _HANDED_DOWN.fullmatch(name)}
    variables: dict[str, str] = {
        **own,
        **launch_variables(order, own),
        WATCHED_VARIABLE: "1",
    }
    if launch.nodes > 1:
        port = random.SystemRandom().randrange(*_PORTS)
        address = hosts[0].rpartition("@")[2]  # without the user of `user@host`
        variables |= Rendezvous(address, port, launch.nodes).variables()
    names = "".join(f"  {n}) name={shlex.quote(host)} ;;\n" for n, host in enumerate(hosts))
    command = agent_command(order, parent=0)
    script = order.run_dir / LOGS / "agent.sh"
    script.touch(0o600)
    text = (
        "#!/bin/sh\n"
        f"{_NODE_NUMBER}"
        f'case "$node" in\n{names}esac\n'
        f"export {NODE_VARIABLE}=$node {NODE_NAME_VARIABLE}=$name\n"
        + "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        + f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(command)}\n"
    )
    script.write_bytes(os.fsencode(text))  # names of files and values as they are, byte by byte
    return script


class CommandJob:
    """The commands of one run, by the host or the hosts that each is for."""

    def __init__(
        self, order: Order, hosts: Sequence[str], commands: Mapping[str, Sequence[str]]
    ) -> None:
        self._order = order
        self._hosts = hosts
        self._files = RunFiles(order.run_dir)
        self._files.live()
        self._broken_seconds: float | None = None
        self._over = threading.Event()
        self._clients = {
            host: start_detached(command, order.run_dir / LOGS / node_file(AGENT_LOG, number))
            for number, (host, command) in enumerate(commands.items())
        }
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self._over.wait(SIGN_OF_LIFE_SECONDS):
            self._files.live()

    def wait(self, seconds: float) -> JobState:
        """It ends with the last command, or a few seconds after the first that fails."""
        deadline = time.monotonic() + seconds
        while True:
            codes = {host: client.poll() for host, client in self._clients.items()}
            failed = {host: code for host, code in codes.items() if code}
            now = time.monotonic()
            if failed and self._broken_seconds is None:
                self._broken_seconds = now
            last_words = (self._broken_seconds or now) + _LAST_WORDS_SECONDS
            if None not in codes.values() or now >= last_words:
                return self._ended(failed)
            if now >= deadline:
                return JobState("running")
            running = next(self._clients[host] for host, code in codes.items() if code is None)
            try:
                running.wait(max(0.0, min(deadline, last_words if failed else now + 0.5) - now))
            except subprocess.TimeoutExpired:
                continue

    def _ended(self, failed: Mapping[str, int]) -> JobState:
        logs = self._order.run_dir / LOGS
        words = {
            node: read_json_object(logs / node_file(OUTCOME_FILE, node), [])
            for node in range(len(self._hosts))
        }
        kills = max(
            (outcome.get("kernel_oom_kills", 0) for outcome in words.values() if outcome), default=0
        )
        if not failed:
            return JobState("ended", exit_code=0, kernel_oom_kills=kills)
        silent = [host for node, host in enumerate(self._hosts) if words[node] is None]
        # The first that was lost, or else that failed; one that was killed there is no lost host.
        lost = {host: code for host, code in failed.items() if code != _KILLED}
        lost = {host: code for host, code in lost.items() if {*host.split(",")} & {*silent}}
        host, code = next(iter((lost or failed).items()))
        if lost:
            log = logs / node_file(AGENT_LOG, [*self._clients].index(host))
            lines = log.read_bytes().decode("utf-8", "replace").strip().splitlines()
            said = lines[-1][:200] if lines else ""
            what = f"the command for {host} ended with exit code {code}"
            detail = f"host {', '.join(silent)} was lost: {what}{said and f': {said}'}"
            return JobState("ended", detail, code, "interrupted", kills)
        return JobState("ended", f"on {host}", code, kernel_oom_kills=kills)

    def cancel(self, grace_seconds: float) -> None:
        """By the run folder on every host; then the commands, in case they hold on."""
        self._files.end(grace_seconds)
        deadline = time.monotonic() + grace_seconds + _END_SECONDS
        for client in self._clients.values():
            try:
                client.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self._over.set()
        for client in self._clients.values():
            end_run(client, self._order.run_dir, 0.0)
        self._files.remove()

    def symptoms(self) -> Symptoms:
        """Where each rank is: nobody here sees the processes of other hosts."""
        return Symptoms.elsewhere(self._hosts, self._order.resolved.launch)

    def ask_for_stacks(self) -> None:
        """By the agents, which pass the request on."""
        self._files.ask_for_stacks()
