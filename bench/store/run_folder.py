"""The folder of one run while it is being written."""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import MAXYEAR, UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from bench.record import RunStatus, RunSummary
from bench.redaction import redact
from bench.spec import ResolvedRun
from bench.store import layout
from bench.store.atomic import (
    reporting_failed_writes,
    write_json_atomically,
    write_text_atomically,
)
from bench.store.digest import with_digest
from bench.store.file_lock import FileLock
from bench.store.reading import read_json_object


def utc_now() -> str:
    """Now, as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RunFolder:
    """Owns one run: holds its lock from creation until `close` ([Note: liveness by flock]).

    `status` is what was last written. Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path, run_id: str, status: RunStatus, lock: FileLock) -> None:
        self.path = path
        self.run_id = run_id
        self.status = status
        self._lock = lock

    @classmethod
    def create(cls, runs: Path, resolved: ResolvedRun, status: RunStatus) -> RunFolder:
        """Make a new folder under `runs`, write spec and status into it, and own it.

        Raises:
            StoreFullError: no space; nothing of the run is left behind but an empty folder.
        """
        cell = f"{resolved.slug}-{resolved.config_hash}"
        with reporting_failed_writes(runs):
            (runs / cell).mkdir(parents=True, exist_ok=True)
            path = _new_unique_folder(runs / cell)
            (path / layout.LOGS).mkdir()
        lock = FileLock(path / layout.OWNER_LOCK)
        lock.acquire(f"pid {os.getpid()} on {socket.gethostname()}")
        folder = cls(path, f"{cell}/{path.name}", status, lock)
        try:
            write_text_atomically(path / layout.SPEC, resolved.model_dump_json(indent=2) + "\n")
            folder.write_status(status)
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def logs_path(self) -> Path:
        """Folder of the text that the processes print."""
        return self.path / layout.LOGS

    def write_status(self, status: RunStatus) -> None:
        """Replace `status.json`.

        Raises:
            StoreFullError: no space; the previous status stands.
        """
        write_json_atomically(self.path / layout.STATUS, status.model_dump(mode="json"))
        self.status = status

    def finish(self, status: RunStatus) -> None:
        """Replace `status.json` for the last time, with a digest of every file of the run.

        Raises:
            StoreFullError: no space; the previous status stands.
        """
        document = with_digest(self.path / layout.STATUS, status.model_dump(mode="json"))
        self.write_status(RunStatus.model_validate(document))

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Replace `env.json`; anything that looks like a secret is redacted here."""
        write_json_atomically(self.path / layout.ENVIRONMENT, redact(environment))

    def write_summary(self, summary: RunSummary) -> None:
        """Replace `summary.json`: a convenience for other tools, never read back by ours."""
        write_json_atomically(self.path / layout.SUMMARY, summary.model_dump(mode="json"))

    def read_runtime(self) -> dict[str, Any]:
        """What rank 0 said about torch and its devices; empty if it did not get that far."""
        return read_json_object(self.path / layout.RUNTIME, []) or {}

    def read_failures(self) -> dict[int, dict[str, Any]]:
        """`failure.rank<N>.json` of every rank that left a readable one."""
        states = {
            layout.rank_of(file): read_json_object(file, [])
            for file in sorted(self.path.glob(layout.FAILURE_GLOB))
        }
        return {
            rank: state for rank, state in states.items() if rank is not None and state is not None
        }

    def close(self) -> None:
        """Give up ownership. A run whose status still says running now reads as interrupted."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stamp_of(moment: datetime) -> str:
    """With milliseconds, so that runs sort in the order in which they started."""
    return moment.strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"


def _dated(folder: str) -> datetime | None:
    """The moment in the name of a run's folder; None where it has another name."""
    try:
        return datetime.strptime(folder.partition("-")[0], "%Y%m%dT%H%M%S.%f%z")
    except ValueError:
        return None


def _moment(runs: Path) -> datetime:
    """Now, or just behind the newest run where its date is ahead of the clock."""
    now = datetime.now(UTC)
    stamp = _stamp_of(now)
    dates = (_dated(folder.name) for folder in runs.glob("*/*") if folder.name > stamp)
    ahead = [moment for moment in dates if moment and moment.year < MAXYEAR]
    return max([now, *(moment + timedelta(milliseconds=1) for moment in ahead)])


#: When this process made its latest run.
_stamps: list[str] = []


def _new_unique_folder(cell: Path) -> Path:
    while True:
        stamp = _stamp_of(_moment(cell.parent))
        if stamp in _stamps:
            time.sleep(0.001)  # two runs of this process in one millisecond would have no order
            continue
        _stamps[:] = [stamp]
        path = cell / f"{stamp}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
