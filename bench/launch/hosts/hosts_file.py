"""The hosts of `--launcher torchrun --hosts FILE`: one per line; the first one leads."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.errors import UsageError
from bench.launch.rendezvous import NODE_VARIABLE


def read_hosts(file: Path) -> tuple[str, ...]:
    """Names or addresses, by which the hosts reach each other; `#` begins a comment.

    What follows a name on its line (`slots=8` of other tools) is left out.

    Raises:
        UsageError: the file cannot be read, names fewer than two hosts, or one of them twice.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hosts {file}: cannot be read: {error}") from error
    hosts = tuple(words[0] for line in lines if (words := line.partition("#")[0].split()))
    if len(hosts) <= 1:
        raise UsageError(
            f"--hosts {file}: expected two hosts or more, one per line, found {len(hosts)}; on one"
            " machine leave --launcher out"
        )
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UsageError(f"--hosts {file}: {', '.join(twice)} stands there more than once")
    return hosts


def own_number(hosts: Sequence[str], variables: Mapping[str, str] = os.environ) -> int:
    """Which of `hosts` this machine is: by MFSDP_BENCH_NODE, its name, or its addresses.

    Raises:
        UsageError: none of them, or more than one.
    """
    named = variables.get(NODE_VARIABLE)
    if named is not None:
        if not named.isdecimal() or int(named) >= len(hosts):
            raise UsageError(
                f"{NODE_VARIABLE}={named}: expected the number of a host, 0 to {len(hosts) - 1}"
            )
        return int(named)
    own = socket.gethostname()
    names = {own, own.partition(".")[0], socket.getfqdn()}
    found = [n for n, host in enumerate(hosts) if host in names]
    found = found or [n for n, host in enumerate(hosts) if _is_here(host)]
    if len(found) == 1:
        return found[0]
    which = "none of" if not found else f"more than one ({', '.join(hosts[n] for n in found)}) of"
    raise UsageError(
        f"this machine, {own}, is {which} the hosts {', '.join(hosts)}: name it there as it calls"
        f" itself, or set {NODE_VARIABLE} to its number there, from 0"
    )


def _is_here(host: str) -> bool:
    """Whether an address of `host` is one of this machine: only such a one can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
