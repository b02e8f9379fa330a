"""How far each rank has come, from the sizes of the files it appends to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class _Tail:
    path: Path
    grown_seconds: float
    size_bytes: int = 0
    lines: int = 0

    def read_new(self, now_seconds: float) -> bool:
        """True if the file has grown; reads only what is new."""
        try:
            if self.path.stat().st_size == self.size_bytes:
                return False
            with self.path.open("rb") as stream:
                stream.seek(self.size_bytes)
                added = stream.read()
        except OSError:
            return False
        self.size_bytes += len(added)
        self.lines += added.count(b"\n")
        if added:
            self.grown_seconds = now_seconds
        return bool(added)


class Heartbeat:
    """Counts the finished steps of each rank. One stat per rank and call; a read only on growth.

    Args:
        paths: the step file of each rank, indexed by rank; they need not exist yet.
        now_seconds: a monotonic clock's reading at the start.
    """

    def __init__(self, paths: list[Path], now_seconds: float) -> None:
        self._tails = [_Tail(path, now_seconds) for path in paths]
        self.last_growth_seconds = now_seconds

    def poll(self, now_seconds: float) -> None:
        """Look at the files; remembers `now_seconds` if any of them has grown."""
        if any([tail.read_new(now_seconds) for tail in self._tails]):  # noqa: C419 - every file is read
            self.last_growth_seconds = now_seconds

    @property
    def steps(self) -> list[int]:
        """Finished steps of each rank."""
        return [tail.lines for tail in self._tails]

    def silent_seconds(self, now_seconds: float) -> list[float]:
        """Time since each rank's last line, or since the start."""
        return [now_seconds - tail.grown_seconds for tail in self._tails]

    @property
    def finished_steps(self) -> int:
        """Steps that all ranks have finished."""
        return min(self.steps)

    @property
    def started(self) -> bool:
        """True once any rank has finished a step."""
        return any(self.steps)

    @property
    def folder_is_gone(self) -> bool:
        """True if nobody can write into the folder of the files any more."""
        return not self._tails[0].path.parent.is_dir()

    def rank_behind(self) -> int | None:
        """The one rank with fewer steps than every other, None if there is no such rank."""
        fewest = min(self.steps)
        behind = [rank for rank, count in enumerate(self.steps) if count == fewest]
        return behind[0] if len(behind) == 1 and len(self.steps) > 1 else None
