"""The results folder: makes runs, finds them again, keeps plans. Files are the truth."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import DamagedRecordError, StoreLockedError, UsageError
from bench.record import RunOutline, RunRecord, RunStatus
from bench.spec import ResolvedRun
from bench.store import layout
from bench.store.atomic import reporting_failed_writes, write_json_atomically
from bench.store.documents import NamedDocuments, Validations
from bench.store.file_lock import FileLock, holder_of
from bench.store.imports import Imports
from bench.store.reading import read_json_object, read_outline, read_record, read_status
from bench.store.run_folder import RunFolder, utc_now

_MAX_NAMED_RUNS = 10


@dataclass(frozen=True)
class DamagedRun:
    """A run folder that cannot be read as a record, and why."""

    run_id: str
    problem: str


class ResultsStore:
    """All runs and plans under one root. Create it with `open`.

    baselines: named reference numbers. noise: A/A calibrations, by key of the hardware. imports:
    runs of other frameworks. validations: verdicts on engines.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.baselines = NamedDocuments(root / layout.BASELINES, "baseline")
        self.noise = NamedDocuments(root / layout.NOISE, "noise calibration")
        self.imports = Imports(root / layout.IMPORTS)
        self.validations = Validations(root / layout.VALIDATIONS)

    @classmethod
    def open(cls, path: str | Path, create: bool) -> ResultsStore:
        """Open the results folder `path`; with `create`, make it where there is none.

        Raises:
            NotAResultsFolderError: the path is something else, or of a newer version.
            StoreFullError: no space to create it.
        """
        root = Path(path).expanduser().absolute()
        layout.open_layout(root, create=create)
        return cls(root)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one runner of this folder.

        Raises:
            StoreLockedError: another living process is; the message names it.
        """
        path = self.root / layout.RUNNER_LOCK
        lock = FileLock(path)
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {utc_now()}"
        if not lock.acquire(holder):
            raise StoreLockedError(
                f"another runner is using {self.root} ({holder_of(path) or 'unknown process'});"
                " wait for it, stop it, or use another folder with --results"
            )
        try:
            yield
        finally:
            lock.release()

    def new_run(
        self,
        resolved: ResolvedRun,
        *,
        sweep: str | None,
        cell: str | None,
        repeat: int,
        arm: str | None,
        code: str,
        attempt: int | None = None,
    ) -> RunFolder:
        """Make the folder of a run that is about to start; the caller owns it until `close`.

        Raises:
            StoreFullError: no space.
        """
        status = RunStatus(
            state="running",
            started_utc=utc_now(),
            sweep=sweep,
            cell=cell,
            repeat=repeat,
            arm=arm,
            attempt=attempt,
            code=code,
            comparable_in_time=resolved.comparable_in_time,
        )
        return RunFolder.create(self.root / layout.RUNS, resolved, status)

    def records(
        self, *, sweep: str | None = None, damaged: list[DamagedRun] | None = None
    ) -> Iterator[RunRecord]:
        """Readable runs, oldest first; with `sweep`, only those of that sweep.

        Runs that had to be left out are added to `damaged`.
        """
        for run_id, path in self._folders(sweep):
            try:
                yield read_record(path, run_id)
            except DamagedRecordError as error:
                if damaged is not None:
                    damaged.append(DamagedRun(run_id, str(error)))

    def statuses(self, sweep: str) -> Iterator[tuple[str, Path, RunStatus]]:
        """(id, folder, status) of the runs of a sweep, oldest first; nothing else is read."""
        for run_id, path in self._folders():
            status = read_status(path, [])
            if status.sweep == sweep:
                yield run_id, path, status

    def outlines(self, sweep: str | None = None) -> tuple[list[RunOutline], list[DamagedRun]]:
        """All runs, or those of `sweep`, oldest first, without their samples; and the damaged."""
        outlines, damaged = [], []
        for run_id, path in self._folders(sweep):
            try:
                outlines.append(read_outline(path, run_id))
            except DamagedRecordError as error:
                damaged.append(DamagedRun(run_id, str(error)))
        return outlines, damaged

    def read(self, run: str) -> RunRecord:
        """The run of this id, or the only one whose id contains `run`.

        Raises:
            UsageError: no run or several match.
            DamagedRecordError: the run cannot be read.
        """
        run_id, path = self.find(run)
        return read_record(path, run_id)

    def find(self, run: str) -> tuple[str, Path]:
        """Id and folder of the run that `run` names, as `read` does.

        `SWEEP:CELL` names the newest run of a cell.

        Raises:
            UsageError: no run or several match.
        """
        folders = dict(self._folders())
        if run in folders:
            return run, folders[run]
        if ":" in run:
            return self._newest_of_cell(run)
        matches = [run_id for run_id in folders if run in run_id]
        if len(matches) == 1:
            return matches[0], folders[matches[0]]
        if not matches:
            raise UsageError(
                f"no run in {self.root} has {run!r} in its id ({len(folders)} runs there): give an"
                " id, or a part of one, that `mfsdp-bench status` lists"
            )
        shown = "\n  ".join(matches[:_MAX_NAMED_RUNS])
        more = "\n  ..." if len(matches) > _MAX_NAMED_RUNS else ""
        raise UsageError(
            f"{len(matches)} runs have {run!r} in their id; give more of it:\n  {shown}{more}"
        )

    def _newest_of_cell(self, name: str) -> tuple[str, Path]:
        sweep, _, cell = name.partition(":")
        attempts = [
            (run_id, path) for run_id, path, status in self.statuses(sweep) if status.cell == cell
        ]
        if not attempts:
            raise UsageError(
                f"no run of cell {cell!r} of sweep {sweep!r} in {self.root}: `mfsdp-bench status"
                f" {sweep}` lists the cells"
            )
        return attempts[-1]

    def write_plan(self, sweep_id: str, document: dict[str, Any]) -> None:
        """Keep the plan of a sweep: all cells, the pruned ones with reasons.

        Raises:
            UsageError: the id cannot be a folder name.
            StoreFullError: no space.
        """
        folder = self.root / layout.SWEEPS / layout.checked_identifier("sweep id", sweep_id)
        with reporting_failed_writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json_atomically(folder / layout.PLAN, document)

    def read_plan(self, sweep_id: str) -> dict[str, Any]:
        """The plan kept under `sweep_id`.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        layout.checked_identifier("sweep id", sweep_id)
        problems: list[str] = []
        file = self.root / layout.SWEEPS / sweep_id / layout.PLAN
        document = read_json_object(file, problems)
        if document is None:
            known = ", ".join(self.sweeps()) or "none"
            runs = len(self._folders(sweep_id))
            if runs or problems:
                raise UsageError(
                    f"the plan of sweep {sweep_id!r} is lost ({problems[0] if problems else file}),"
                    f" its runs are not ({runs} in {self.root}): run the sweep again, which writes"
                    " a new plan and counts what is finished"
                )
            hint = " (give its id, not its file)" if sweep_id.endswith((".yaml", ".yml")) else ""
            raise UsageError(f"no sweep {sweep_id!r}{hint} in {self.root}; known sweeps: {known}")
        return document

    def sweeps(self) -> list[str]:
        """Ids of the sweeps that have a plan, in alphabetical order."""
        return sorted(
            file.parent.name for file in self.root.glob(f"{layout.SWEEPS}/*/{layout.PLAN}")
        )

    def sweeps_of_arms(self, name: str) -> list[str]:
        """The sweeps of this name whose ids end with what their arms are."""
        return [sweep for sweep in self.sweeps() if layout.is_of_arms(sweep, name)]

    def sweeps_called(self, name: str) -> list[str]:
        """The sweep of this id; where there is none, those of this name with any arms."""
        return [name] if name in self.sweeps() else self.sweeps_of_arms(name)

    def only_called(self, name: str) -> str:
        """The only sweep of this name, where its arms are left out of it; else the name itself."""
        called = self.sweeps_called(name)
        return called[0] if len(called) == 1 else name

    def _folders(self, sweep: str | None = None) -> list[tuple[str, Path]]:
        """(run id, folder) of every run, or of those of a sweep; oldest first."""
        if sweep is not None:
            return [(run_id, path) for run_id, path, _ in self.statuses(sweep)]
        folders = [
            (f"{path.parent.name}/{path.name}", path)
            for path in self.root.glob(f"{layout.RUNS}/*/*")
            if path.is_dir()
        ]
        return sorted(folders, key=lambda item: (item[1].name, item[0]))
