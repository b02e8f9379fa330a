"""What the fork server is asked for: a group of ranks that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerGroup:
    """Ranks to fork. core: folder that holds mfsdp_core, None for the checkout's own.

    address: the socket that each connects to. folder: where each writes what it prints.
    paths: further folders to import from.
    """

    ranks: int
    address: str
    folder: Path
    device: str
    core: Path | None = None
    paths: tuple[str, ...] = ()
