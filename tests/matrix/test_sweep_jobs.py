"""Arrays of jobs in a results folder: found again, adopted, settled. The queue is stood in for."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Event

import pytest

from bench.errors import UsageError
from bench.launch.slurm.queue import QueuedJob
from bench.record import RunStatus
from bench.resolve import Machine
from bench.spec import LaunchSpec
from bench.store import ResultsStore
from sweeps.definition import parse_sweep
from sweeps.execution import Side
from sweeps.jobs import (
    Submission,
    jobs_folder,
    read_arrays,
    see_jobs,
    settle,
    without_secrets,
)
from sweeps.plan import Plan
from sweeps.planning import make_plan
from sweeps.progress import Progress, Remark
from sweeps.queued import run_queued
from sweeps.resume import RunOptions
from sweeps.runner import SweepOutcome

TWO = "name: two\nmatrix: {product: {engine.name: [ddp, mfsdp]}}\n"
LAPTOP = Machine(cpu_count=8, memory_bytes=16 * 2**30, nodes=4)


class Queue:
    """Keeps arrays and how their jobs are; the last word of each look is `after`."""

    most_at_once = 1000

    def __init__(self, after: QueuedJob | None = None) -> None:
        self.arrays: dict[str, str] = {}
        self.looks: dict[str, QueuedJob] = {}
        self.after = after
        self.asked = 0
        self.cut_off = False
        self.first_reason = "Resources"

    def submit(self, request: str, count: int) -> str:
        array = str(7 + len(self.arrays))
        self.arrays[request] = array
        self.looks |= {f"{array}_{n}": QueuedJob("queued", self.first_reason) for n in range(count)}
        if self.cut_off:
            raise KeyboardInterrupt
        return array

    def find(self, name: str) -> str | None:
        return self.arrays.get(name)

    def look(self, jobs) -> dict[str, QueuedJob]:
        self.asked += 1
        found = {job: self.looks.get(job, QueuedJob("ended")) for job in jobs}
        if self.after is not None:
            self.looks = dict.fromkeys(self.looks, self.after)
        return found

    def cancel(self, arrays) -> None:  # noqa: ARG002
        raise AssertionError("nobody asked to cancel")


def plan(text: str = TWO) -> Plan:
    return make_plan(parse_sweep(text), LAPTOP)


def follow(store: ResultsStore, queue: Queue, *, stop: bool = False) -> tuple[SweepOutcome, list]:
    said: list[Progress] = []
    event = Event()
    if stop:
        event.set()
    submission = Submission(queue, {"": None}, {}, lambda name, *_: name, 0.0)
    sides = {None: Side(lambda *_, **__: RunStatus(), lambda _: "code")}
    outcome = run_queued(
        submission, plan(), store, sides=sides, options=RunOptions(), whole=plan(), stop=event,
        publish=said.append,
    )  # fmt: skip
    return outcome, [event.text for event in said if isinstance(event, Remark)]


def record(store: ResultsStore, job: str, cell: str = "ddp") -> str:
    """A run of a job that is going on, as far as its files say."""
    resolved = next(one.resolved for one in plan().cells if one.id == cell)
    with store.new_run(resolved, sweep="two", cell=cell, repeat=0, arm=None, code="code") as run:
        run.write_status(run.status.model_copy(update={"job": job}))
        return run.run_id


def test_a_runner_that_leaves_is_followed_by_one_that_submits_nothing(store: ResultsStore) -> None:
    queue = Queue()
    outcome, _ = follow(store, queue, stop=True)
    assert outcome.interrupted
    assert outcome.not_started == 2
    (array,) = read_arrays(store, "two")
    assert array.jobs == {"7_0": "ddp", "7_1": "mfsdp"}

    queue.after = QueuedJob("ended")
    outcome, said = follow(store, queue)
    assert len(queue.arrays) == 1
    assert said[0] == "jobs: 2 to wait for, 2 of them found in the queue"
    assert not outcome.interrupted
    assert read_arrays(store, "two")[0].over


def test_a_submission_that_was_cut_off_is_found_by_its_name(store: ResultsStore) -> None:
    queue = Queue()
    queue.cut_off = True
    with pytest.raises(KeyboardInterrupt):
        follow(store, queue)
    assert [array.id for array in read_arrays(store, "two")] == [None]
    _, said = follow(store, queue, stop=True)
    assert len(queue.arrays) == 1, "nothing is submitted twice"
    assert "2 of them found" in said[0]


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [("jobs_version", 0, "not of this version"), ("cells", None, "cells: Input should be")],
)
def test_a_file_of_jobs_that_cannot_be_read_is_refused_with_what_to_do(
    store: ResultsStore, key, value, found
) -> None:
    follow(store, Queue(), stop=True)
    (file,) = jobs_folder(store, "two").glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UsageError, match=f"{found}.*; end its jobs with scancel"):
        read_arrays(store, "two")


def test_jobs_that_end_before_a_run_are_told_of(store: ResultsStore) -> None:
    """As where nodes do not see the folder: no record will speak of them."""
    failed = QueuedJob("ended", detail="job 7_0 ended as FAILED (nodes n1)")
    _, said = follow(store, Queue(after=failed))
    file = store.root / "sweeps" / "two" / "jobs" / "7_0_0_log.out"
    assert said[-2] == (
        "2 jobs ended before a run began: job 7_0 ended as FAILED (nodes n1);"
        f" there is no {file}: do the nodes see that folder at that path?"
    )


def test_a_job_that_can_never_start_is_told_with_what_to_do(store: ResultsStore) -> None:
    queue = Queue(after=QueuedJob("ended"))
    queue.first_reason = "PartitionTimeLimit"
    _, said = follow(store, queue)
    why = "longer than the partition allows; cancel, and lower time_minutes"
    assert said[1] == f"jobs: 0 running, 2 waiting (PartitionTimeLimit 2: {why})"


def test_jobs_that_are_gone_are_submitted_again(store: ResultsStore) -> None:
    queue = Queue()
    follow(store, queue, stop=True)
    queue.looks = dict.fromkeys(queue.looks, QueuedJob("ended"))
    follow(store, queue, stop=True)
    assert [array.over for array in read_arrays(store, "two")] == [True, False]


@pytest.mark.parametrize(
    ("look", "state", "reason"),
    [
        (QueuedJob("running"), "running", ""),
        (QueuedJob("queued", "BeginTime"), "preempted", "job 7_0 was requeued (BeginTime)"),
        (QueuedJob("ended", "", "n1", "timeout", "time limit"), "timeout", "time limit"),
        (QueuedJob("ended", detail="gone"), "interrupted", "gone"),
    ],
)
def test_what_a_job_left_behind_gets_the_end_that_the_queue_knows(
    store: ResultsStore, look: QueuedJob, state: str, reason: str
) -> None:
    run_id = record(store, "7_0")
    assert store.read(run_id).status.state == "running", "its lock is free, and says nothing"
    queue = Queue()
    queue.looks = {"7_0": look}
    settle(store, "two", see_jobs(store, "two", queue))
    status = store.read(run_id).status
    assert (status.state, status.reason) == (state, reason)
    assert queue.asked == 1


def test_a_credential_is_not_handed_to_a_job_without_its_value() -> None:
    cell = plan().cells[0]
    launch = LaunchSpec(ranks=2, env={"NCCL_NET_PLUGIN": "http://user:secret@host/"})
    resolved = cell.resolved.model_copy(update={"launch": launch})
    with pytest.raises(UsageError, match=r"env.NCCL_NET_PLUGIN holds a credential"):
        without_secrets(replace(plan(), cells=(replace(cell, resolved=resolved),)))
