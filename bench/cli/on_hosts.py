"""`--launcher torchrun`: the first host makes the runs of the sweep, with agents on the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from bench.cli import console, exit_codes
from bench.cli.interrupts import stop_on_signals
from bench.cli.launchers import HostsSettings
from bench.launch.hosts.follower import follow
from bench.launch.hosts.hosts_file import own_number, read_hosts
from bench.launch.hosts.leader import Leader
from bench.launch.stop_request import StopRequest


def on_hosts(settings: BaseModel, results: Path, lead: Callable[[Leader], int]) -> int:
    """Do the part of this host; the exit code is the same on all of them.

    Args:
        settings: `HostsSettings`.
        results: the results folder, which they share.
        lead: what the first host does once all are there.

    Raises:
        NothingMeasuredError: not every host has come.
        UsageError: the file is wrong, or hosts were started with different commands.
    """
    asked = HostsSettings.model_validate(settings)
    hosts, seconds = read_hosts(asked.hosts), asked.seconds
    number = own_number(hosts)
    stop = StopRequest()
    if number > 0:
        with stop_on_signals(stop):
            return follow(
                hosts, number, results, sys.argv[1:], seconds=seconds, stop=stop, say=console.note
            )
    with Leader(hosts, results, sys.argv[1:]) as leader:
        console.note(f"waiting for {', '.join(hosts[1:])}, {seconds:g} s at most")
        with stop_on_signals(stop, lambda _: console.note(stop.why)):
            leader.meet(seconds, stop)
        code = exit_codes.INTERRUPTED if stop.is_set() else lead(leader)
        leader.ended(code)
    return code
