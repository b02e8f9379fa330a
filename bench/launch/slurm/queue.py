"""`SlurmQueue`: the controller as a queue of job arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bench.launch.protocol import QueuedJob
from bench.launch.slurm.controller import ask, cancel, look_at
from bench.launch.slurm.settings import SlurmSettings
from bench.launch.slurm.submission import MAX_ARRAY, JobRequest, submit_array


class SlurmQueue:
    """Asks about all jobs at once, and no more often than its runner wants to know."""

    most_at_once = MAX_ARRAY

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    def submit(self, request: JobRequest, count: int) -> str:
        """Submit an array of `count` jobs; its id."""
        return submit_array(request, self.settings, count)

    def look(self, jobs: Collection[str]) -> Mapping[str, QueuedJob]:
        """How each of `jobs` (as 12_3) is."""
        return look_at(jobs)

    def find(self, name: str) -> str | None:
        """Id of the array of this name; None if the controller knows none."""
        found = ask(["squeue", "-h", "-t", "all", "-n", name, "-o", "%F"]).split()
        return found[0] if found else None

    def cancel(self, arrays: Collection[str]) -> None:
        """Have whole arrays ended."""
        cancel(arrays)
