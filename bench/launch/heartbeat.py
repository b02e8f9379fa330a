"""How far each rank has come, from what the sample files have grown by."""

from __future__ import annotations

from pathlib import Path

from bench.store.samples import GLOB, lines_by_rank


class Heartbeat:
    """Counts the finished steps of each rank. One stat per file and call; a read only on growth.

    Args:
        folder: of the run; its sample files need not exist yet.
        ranks: of the run.
        now_seconds: a monotonic clock's reading at the start.
    """

    def __init__(self, folder: Path, ranks: int, now_seconds: float) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self._lines = [0] * ranks
        self._grown_seconds = [now_seconds] * ranks
        self.last_growth_seconds = now_seconds

    def poll(self, now_seconds: float) -> None:
        """Look at the files; remembers `now_seconds` for those ranks that have added lines."""
        for file in self._folder.glob(GLOB):
            for rank, lines in lines_by_rank(self._new_lines(file)).items():
                if lines and rank < len(self._lines):
                    self._lines[rank] += lines
                    self._grown_seconds[rank] = self.last_growth_seconds = now_seconds

    def _new_lines(self, file: Path) -> bytes:
        """Whole lines that were added since the last look."""
        known = self._read_bytes.get(file, 0)
        try:
            if file.stat().st_size == known:
                return b""
            with file.open("rb") as stream:
                stream.seek(known)
                added = stream.read()
        except OSError:
            return b""
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes[file] = known + len(whole)
        return whole

    @property
    def steps(self) -> list[int]:
        """Finished steps of each rank."""
        return list(self._lines)

    def silent_seconds(self, now_seconds: float) -> list[float]:
        """Time since each rank's last line, or since the start."""
        return [now_seconds - grown for grown in self._grown_seconds]

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
        return not self._folder.is_dir()

    def rank_behind(self) -> int | None:
        """The one rank with fewer steps than every other, None if there is no such rank."""
        fewest = min(self.steps)
        behind = [rank for rank, count in enumerate(self.steps) if count == fewest]
        return behind[0] if len(behind) == 1 and len(self.steps) > 1 else None
