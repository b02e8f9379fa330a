"""What the fork server is asked for: a group of ranks that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerGroup:
    """Ranks to fork. core: folder that holds mfsdp_core, None for the checkout's own.

    address: the socket that each connects to. folder: where each writes what it prints.
    paths: further folders to import from, which come before those of the fork server.
    """

    ranks: int
    address: str
    folder: Path
    device: str
    core: Path | None = None
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reap:
    """Ask how these processes, which have ended or are about to, came to their end."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """A process group of the first `ranks` ranks. rendezvous: a file of its own."""

    ranks: int
    rendezvous: str
