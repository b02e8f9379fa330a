"""Arrays of jobs of a sweep: one file each, written before the queue is asked, read by the jobs.

The file says which cell each job makes, of which plan, with which code. Whatever becomes of the
process that submitted it, the next one finds the jobs again.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from bench.errors import UsageError, first_problem
from bench.launch.code import RankCode
from bench.launch.slurm.queue import QueuedJob, SlurmQueue
from bench.record import RunStatus
from bench.redaction import redact_text
from bench.spec import LaunchSpec
from bench.store import RunFolder, layout
from bench.store.atomic import write_json_atomically
from bench.store.reading import read_json_object
from bench.store.results_store import ResultsStore
from bench.store.run_folder import utc_now
from sweeps.plan import Plan
from sweeps.resume import RunOptions

JOBS_VERSION = 1
# What a run takes beside its own limit: ranks load torch, a record is written.
_BESIDE_SECONDS = 180.0

Codes = Mapping[str, RankCode | None]
"""By arm, under "" without arms; None: the code of the process that makes the run."""


@dataclass(frozen=True)
class JobArray:
    """Jobs alike; job n makes what is missing of cell `cells[n]`.

    id: of the array, None until the queue has said it. plan: of these cells alone. settings: of the
    launcher, as it wrote them. force, retry_failed, block_retries: as of `RunOptions`. argv: what
    was typed, for the records. over: no job of it is left, and every run of theirs has its end.
    """

    name: str
    plan: Annotated[Plan, PlainValidator(Plan.from_document), PlainSerializer(Plan.to_document)]
    cells: tuple[str, ...]
    codes: Codes
    settings: Mapping[str, Any]
    force: bool = False
    retry_failed: bool = False
    block_retries: int = 0
    id: str | None = None
    submitted_utc: str = ""
    argv: tuple[str, ...] = ()
    over: bool = False

    @property
    def jobs(self) -> dict[str, str]:
        """Job -> cell, once the queue has taken them."""
        return {f"{self.id}_{n}": cell for n, cell in enumerate(self.cells)} if self.id else {}

    def write(self, store: ResultsStore) -> Path:
        """Keep it in the results folder; the file.

        Raises:
            StoreFullError: no space.
        """
        file = jobs_folder(store, self.plan.id) / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        document = _ARRAY.dump_python(self, mode="json")
        write_json_atomically(file, {"jobs_version": JOBS_VERSION, **document})
        return file


_ARRAY: TypeAdapter[JobArray] = TypeAdapter(JobArray)


@dataclass(frozen=True)
class Submission:
    """How jobs are asked for.

    request: makes what the queue takes, of a name, the file of the array, what its cells launch and
    the minutes that a job needs. settings: to be kept for the jobs. poll_seconds: between two looks
    at the queue.
    """

    queue: SlurmQueue
    codes: Codes
    settings: Mapping[str, Any]
    request: Callable[[str, Path, LaunchSpec, int], Any]
    poll_seconds: float


def submit(
    submission: Submission,
    plan: Plan,
    store: ResultsStore,
    options: RunOptions,
    cells: Mapping[str, int],
) -> list[str]:
    """A job for each of `cells` (cell -> number of its missing runs); their ids.

    Cells that need the same nodes for the same time are one array.

    Raises:
        UsageError: the queue takes no jobs.
    """
    launches = {cell.id: cell.resolved.launch for cell in plan.cells}

    def size(cell: str) -> tuple[Any, ...]:
        """Nodes, and minutes last."""
        launch = launches[cell]
        seconds = cells[cell] * (launch.timeout_seconds + _BESIDE_SECONDS)
        of_node = launch.device, launch.devices_per_node, launch.threads_per_rank
        return (launch.nodes, launch.ranks, *of_node, math.ceil(seconds / 60))

    jobs: list[str] = []
    most = submission.queue.most_at_once
    for needs, group in itertools.groupby(sorted(cells, key=size), size):
        alike = tuple(group)
        for start in range(0, len(alike), most):
            own = alike[start : start + most]
            array = JobArray(
                name=f"{plan.id}.{secrets.token_hex(4)}",  # what the queue shows as well
                plan=plan.selected(own),
                cells=own,
                codes=submission.codes,
                settings=submission.settings,
                force=options.force,
                retry_failed=options.retry_failed,
                block_retries=options.block_retries,
                submitted_utc=utc_now(),
                argv=tuple(map(redact_text, sys.argv)),
            )
            file = array.write(store)
            request = submission.request(array.name, file, launches[own[0]], needs[-1])
            try:
                taken = replace(array, id=submission.queue.submit(request, len(own)))
            except UsageError:
                file.unlink()
                raise
            taken.write(store)
            jobs += taken.jobs
    return jobs


def jobs_folder(store: ResultsStore, sweep: str) -> Path:
    """Where the arrays of a sweep are kept."""
    return store.root / layout.SWEEPS / layout.checked_identifier("sweep id", sweep) / layout.JOBS


def read_array(file: Path) -> JobArray:
    """One array.

    Raises:
        UsageError: the file is damaged, or of another version.
    """
    problems: list[str] = []
    document = read_json_object(file, problems)
    try:
        if document is not None and document.get("jobs_version") == JOBS_VERSION:
            return _ARRAY.validate_python(document)
        found = problems[0] if problems else "not of this version"
    except ValidationError as error:
        found = first_problem(error)
    raise UsageError(f"{file}: {found}; end its jobs with scancel and remove the file")


def read_arrays(store: ResultsStore, sweep: str) -> list[JobArray]:
    """Every array of a sweep, oldest first.

    Raises:
        UsageError: as `read_array`.
    """
    files = jobs_folder(store, sweep).glob("*.json")
    return sorted((read_array(file) for file in files), key=lambda array: array.submitted_utc)


@dataclass(frozen=True)
class JobsSeen:
    """The jobs of a sweep at one moment: array of each, and how it is. Ended ones too."""

    arrays: tuple[JobArray, ...]
    looks: Mapping[str, QueuedJob]

    @property
    def alive(self) -> dict[str, QueuedJob]:
        """Jobs that wait or run."""
        return {job: look for job, look in self.looks.items() if look.phase != "ended"}

    @property
    def cells(self) -> dict[str, tuple[str, JobArray]]:
        """Cell -> the job that is about to make it, or does, and its array."""
        return {
            cell: (job, array)
            for array in self.arrays
            for job, cell in array.jobs.items()
            if job in self.alive
        }


def see_jobs(store: ResultsStore, sweep: str, queue: SlurmQueue) -> JobsSeen:
    """Ask the queue once about all jobs of a sweep.

    An array whose submission was cut off is found by its name, or else forgotten.
    """
    arrays = []
    for array in read_arrays(store, sweep):
        known = array.id or queue.find(array.name)
        if known is not None:
            arrays.append(replace(array, id=known))
            if array.id is None:
                arrays[-1].write(store)
    asked = {job for array in arrays if not array.over for job in array.jobs}
    asked |= {s.job for _, _, s in store.statuses(sweep) if s.state == "running" and s.job}
    return JobsSeen(tuple(arrays), queue.look(asked))


def settle(store: ResultsStore, sweep: str, seen: JobsSeen) -> None:
    """Write the end of runs whose job is gone without having written it."""
    for run_id, path, status in store.statuses(sweep):
        look = seen.looks.get(status.job or "")
        if status.state == "running" and look is not None and look.phase != "running":
            RunFolder.left_behind(path, run_id, status).finish(_cut_off(status, look))
    for array in seen.arrays:
        if not array.over and not any(job in seen.alive for job in array.jobs):
            replace(array, over=True).write(store)


def _cut_off(status: RunStatus, look: QueuedJob) -> RunStatus:
    """The status of a run that its job has left behind."""
    state, reason = look.state, look.detail
    if look.phase == "queued":
        state, reason = "preempted", f"job {status.job} was requeued ({look.reason})"
    return status.model_copy(
        update={"state": state, "reason": status.reason or reason, "ended_utc": utc_now()}
    )


def without_secrets(plan: Plan) -> None:
    """Refuse what a file cannot hand on to a job.

    Raises:
        UsageError: a setting with a credential in it, which is written nowhere.
    """
    for cell in plan.cells:
        for run in (cell.resolved, *cell.by_arm.values()):
            written = run.model_dump(mode="json")["launch"]["env"]
            names = [name for name, value in run.launch.env.items() if written.get(name) != value]
            if names:
                raise UsageError(
                    f"cell {cell.id}: env.{names[0]} holds a credential, which is kept out of all"
                    " files, so a job or another host would not get it; export the variable where"
                    " you start from, and take it out of the sweep"
                )
