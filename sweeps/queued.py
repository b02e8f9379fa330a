"""A sweep through the queue of a cluster: submit what is missing, adopt what waits or runs, follow.

The runs are made by the jobs themselves (`sweeps.job_program`), so this process may end at any
time. Started again it reads the same files, asks the queue, and goes on following.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime
from threading import Event

from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.launcher import prints_of_job
from bench.record import RunStatus
from bench.store.results_store import ResultsStore
from sweeps.execution import RunMaker, Sides
from sweeps.jobs import (
    JobArray,
    JobsSeen,
    Submission,
    jobs_folder,
    see_jobs,
    settle,
    submit,
    without_secrets,
)
from sweeps.plan import Plan
from sweeps.progress import Remark, RunEnded, Subscriber, SweepStarted
from sweeps.resume import PastRun, Progressed, RunOptions
from sweeps.runner import SweepOutcome, look

# Reasons of Slurm that no patience helps against, and what does.
_FOR_EVER = {
    "PartitionTimeLimit": ": longer than the partition allows; cancel, and lower time_minutes",
    "PartitionNodeLimit": ": more nodes than the partition gives to a job; cancel",
    "PartitionDown": ": the partition is down; wait for it, or cancel and name another",
    "PartitionInactive": ": the partition is inactive; wait for it, or cancel and name another",
    "BadConstraints": ": no node can be what is asked for; cancel, and ask for less",
    "JobHeldUser": ": held; scontrol release JOB lets it go on",
    "JobHeldAdmin": ": held by an operator",
}


def run_queued(
    submission: Submission,
    plan: Plan,
    store: ResultsStore,
    *,
    sides: Sides,
    options: RunOptions,
    whole: Plan,
    stop: Event,
    publish: Subscriber,
) -> SweepOutcome:
    """As `sweeps.runner.run_sides`; a set `stop` leaves the jobs alone.

    Raises:
        UsageError: another runner holds the folder, or the queue takes no jobs.
    """
    maker = RunMaker(plan.id, store, sides, stop, publish)
    with store.lock():
        without_secrets(plan)
        store.write_plan(plan.id, whole.to_document())
        seen = see_jobs(store, plan.id, submission.queue)
        settle(store, plan.id, seen)
        before = look(plan, maker, options)
        missing = Counter(run.cell.id for run in before.missing_runs)
        adopted = {
            cell: job
            for cell, (job, array) in seen.cells.items()
            if cell in missing and _same(plan, array, cell)
        }
        total = len(before.missing_runs)
        publish(SweepStarted(plan.id, total, len(before.done), len(before.failed), before.again))
        known = {run_id for run_id, _, one in store.statuses(plan.id) if one.state != "running"}
        to_submit = {cell: runs for cell, runs in missing.items() if cell not in adopted}
        jobs = {*adopted.values(), *submit(submission, plan, store, options, to_submit)}
        follower = _Follower(maker, submission, jobs, told=set(known), total=total)
        follower.follow(len(adopted))
        after = look(plan, maker, replace(options, force=False, retry_failed=False))
        return _outcome(maker, before, after, known)


def _same(plan: Plan, array: JobArray, cell: str) -> bool:
    """The job makes the cell as it is planned today."""
    now, then = (next(one for one in p.cells if one.id == cell) for p in (plan, array.plan))
    return now.config_hashes == then.config_hashes and plan.interleaved == array.plan.interleaved


def _outcome(
    maker: RunMaker, before: Progressed, after: Progressed, known: set[str]
) -> SweepOutcome:
    """The difference that the jobs have made; the newest run that was cut short stands for it."""
    new = [
        PastRun.of(run_id, s)
        for run_id, _, s in maker.store.statuses(maker.sweep)
        if run_id not in known and s.state != "running"
    ]
    decided = {run.run_id for run in (*after.done, *after.failed)}
    missing = {(run.cell.id, run.repeat, run.arm) for run in after.missing_runs}
    cut_short = {
        where: run
        for run in new
        if run.run_id not in decided and (where := (run.cell, run.repeat, run.arm)) in missing
    }
    ran = (*(run for run in new if run.run_id in decided), *cut_short.values())
    counted = {run.run_id for run in ran}
    return SweepOutcome(
        ran=ran,
        done_before=before.done,
        failed_before=before.failed,
        not_started=len(missing) - len(cut_short),
        interrupted=maker.stop.is_set(),
        lost=tuple(run for run in new if run.run_id not in counted),
    )


@dataclass
class _Follower:
    """Follows `jobs` of a sweep.

    maker: names the sweep; its `publish` is told, its `stop` ends the wait and not the jobs.
    submission: how the queue is asked. jobs: to wait for. told: ids of runs that are no news.
    total: runs to count to, of which `position` have ended. said: the last remark.
    """

    maker: RunMaker
    submission: Submission
    jobs: set[str]
    told: set[str]
    total: int
    position: int = 0
    said: str = ""

    def follow(self, adopted: int) -> None:
        """Until no job is left, or somebody asks to stop. adopted: of the jobs, for the display."""
        sweep, store, stop = self.maker.sweep, self.maker.store, self.maker.stop
        found = f", {adopted} of them found in the queue" if adopted else ""
        self._say(f"jobs: {len(self.jobs)} to wait for{found}")
        while self.jobs and not stop.wait(self.submission.poll_seconds):
            try:
                seen = see_jobs(store, sweep, self.submission.queue)
            except ControllerSilentError as error:
                # It restarts, or this node lost it: jobs do not need it to go on.
                self._say(f"jobs: {len(self.jobs)} to wait for; {error}")
                continue
            settle(store, sweep, seen)
            self._tell_endings()
            self._tell_silent_ends(seen)
            self.jobs &= seen.alive.keys()
            self._say(_counted(seen, self.jobs))

    def _say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            self.maker.publish(Remark(text))

    def _tell_endings(self) -> None:
        for run_id, _, status in self.maker.store.statuses(self.maker.sweep):
            if run_id in self.told or status.state == "running":
                continue
            self.told.add(run_id)
            self.position += 1
            total = max(self.total, self.position)
            past = PastRun.of(run_id, status)
            self.maker.publish(RunEnded(past, self.position, total, _seconds(status)))

    def _tell_silent_ends(self, seen: JobsSeen) -> None:
        """Jobs that are over and never began a run: no record speaks of them."""
        sweep, store = self.maker.sweep, self.maker.store
        began = {status.job for _, _, status in store.statuses(sweep)}
        silent = sorted(self.jobs - seen.alive.keys() - began)
        details = [detail for job in silent if (detail := seen.looks[job].detail)]
        details = [detail for detail in details if "COMPLETED" not in detail]
        if not details:
            return
        file = prints_of_job(jobs_folder(store, sweep), silent[0])
        where = f"see {file}"
        if not file.exists():
            where = f"there is no {file}: do the nodes see that folder at that path?"
        self._say(f"{len(details)} jobs ended before a run began: {details[0]}; {where}")


def _seconds(status: RunStatus) -> float:
    if not status.ended_utc or not status.started_utc:
        return 0.0
    ended = datetime.fromisoformat(status.ended_utc)
    return (ended - datetime.fromisoformat(status.started_utc)).total_seconds()


def _counted(seen: JobsSeen, jobs: set[str]) -> str:
    looks = [seen.looks[job] for job in jobs]
    waiting = Counter(look.reason for look in looks if look.phase == "queued")
    why = ", ".join(
        f"{reason} {count}{_FOR_EVER.get(reason, '')}" for reason, count in waiting.most_common()
    )
    count = waiting.total()
    return f"jobs: {len(looks) - count} running, {count} waiting" + (f" ({why})" if why else "")
