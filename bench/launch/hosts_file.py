"""The file of `--hosts`: one host per line; the first one is node 0."""

from __future__ import annotations

from pathlib import Path

from bench.errors import UsageError


def read_hosts(file: Path) -> tuple[str, ...]:
    """Names by which they are started, and by which they reach the first; `#` begins a comment.

    What follows a name on its line (`slots=8` of other tools) is left out.

    Raises:
        UsageError: the file cannot be read, names no host, or one of them twice.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hosts {file}: cannot be read: {error}") from error
    hosts = tuple(words[0] for line in lines if (words := line.partition("#")[0].split()))
    if not hosts:
        raise UsageError(f"--hosts {file}: expected a host per line, found none")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UsageError(f"--hosts {file}: {', '.join(twice)} stands there more than once")
    return hosts
