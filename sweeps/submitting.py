"""From missing runs to arrays of jobs: cells that need the same nodes for the same time are one."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.launch.protocol import Queue
from bench.spec import LaunchSpec
from bench.store.atomic import write_text_atomically
from bench.store.results_store import ResultsStore
from bench.store.run_folder import utc_now
from sweeps.jobs import Codes, JobArray, new_name
from sweeps.plan import Plan
from sweeps.resume import RunOptions

# What a run takes beside its own limit: ranks load torch, a record is written.
_BESIDE_SECONDS = 180.0


@dataclass(frozen=True)
class Submission:
    """How jobs are asked for.

    request: makes what the queue takes, of a name, the file of the array, what its cells launch and
    the minutes that a job needs. settings: to be kept for the jobs. poll_seconds: between two looks
    at the queue.
    """

    queue: Queue
    codes: Codes
    settings: Mapping[str, Any]
    request: Callable[[str, Path, LaunchSpec, int], Any]
    poll_seconds: float


@dataclass(frozen=True)
class Submitter:
    """Submits cells of one plan."""

    submission: Submission
    plan: Plan
    store: ResultsStore
    options: RunOptions

    def submit(self, cells: Mapping[str, int]) -> list[str]:
        """A job for each of `cells` (cell -> number of its missing runs); their ids.

        Raises:
            UsageError: the queue takes no jobs.
        """
        jobs: list[str] = []
        for array, file, request in self._arrays(cells):
            try:
                known = self.submission.queue.submit(request, len(array.cells))
            except UsageError:
                file.unlink()
                raise
            taken = replace(array, id=known)
            taken.write(self.store)
            jobs += taken.jobs
        return jobs

    def write_scripts(
        self, cells: Mapping[str, int], script: Callable[[Any, int], str]
    ) -> list[Path]:
        """Batch scripts instead, for whoever submits them by hand."""
        paths = []
        for array, file, request in self._arrays(cells):
            paths.append(file.with_suffix(".sbatch"))
            write_text_atomically(paths[-1], script(request, len(array.cells)))
        return paths

    def _arrays(self, cells: Mapping[str, int]) -> Iterator[tuple[JobArray, Path, Any]]:
        """Each array, its file, and how to ask for it."""
        most = self.submission.queue.most_at_once
        for size, group in itertools.groupby(
            sorted(cells, key=self._size(cells)), self._size(cells)
        ):
            alike = tuple(group)
            for start in range(0, len(alike), most):
                array = self._array(alike[start : start + most])
                file = array.write(self.store)
                launch = array.plan.cells[0].resolved.launch
                yield array, file, self.submission.request(array.name, file, launch, size[-1])

    def _array(self, cells: tuple[str, ...]) -> JobArray:
        return JobArray(
            name=new_name(self.plan.id),
            plan=self.plan.selected(cells),
            cells=cells,
            codes=self.submission.codes,
            settings=self.submission.settings,
            force=self.options.force,
            retry_failed=self.options.retry_failed,
            block_retries=self.options.block_retries,
            submitted_utc=utc_now(),
            argv=tuple(sys.argv),
        )

    def _size(self, runs: Mapping[str, int]) -> Callable[[str], tuple[Any, ...]]:
        """Key of a cell: nodes, and minutes last."""
        launches = {cell.id: cell.resolved.launch for cell in self.plan.cells}

        def size(cell: str) -> tuple[Any, ...]:
            launch = launches[cell]
            seconds = runs[cell] * (launch.timeout_seconds + _BESIDE_SECONDS)
            of_node = launch.device, launch.devices_per_node, launch.threads_per_rank
            return (launch.nodes, launch.ranks, *of_node, math.ceil(seconds / 60))

        return size
