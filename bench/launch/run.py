"""`launch`: one run, from its folder to its final status, whatever starts its processes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.errors import StoreFullError, StoreGoneError
from bench.launch.agent import OUTCOME_FILE
from bench.launch.code import RankCode, own_code
from bench.launch.code_proof import Verdict, expect_code, keep_proofs, read_proofs, verdict
from bench.launch.command import WORKER_MODULE
from bench.launch.desync import desync
from bench.launch.ending import Ending, classify, gather_evidence
from bench.launch.environment import collect_environment
from bench.launch.inputs import digest_now
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher, Order
from bench.launch.watch import Heartbeat, Limits, Watch
from bench.record import STOPPED, RunStatus, code_with_inputs
from bench.spec import ResolvedRun
from bench.store import RunFolder
from bench.store.layout import MEMORY
from bench.store.reading import read_record
from bench.store.run_folder import utc_now

_DEFAULT_LIMITS = Limits()
_LOOK_SECONDS = 0.25
_LOCAL = LocalLauncher()


def launch(
    resolved: ResolvedRun,
    folder: RunFolder,
    *,
    stop: threading.Event,
    on_step: Callable[[int], None] | None = None,
    worker_module: str = WORKER_MODULE,
    limits: Limits = _DEFAULT_LIMITS,
    code: RankCode | None = None,
    launcher: Launcher = _LOCAL,
) -> RunStatus:
    """Run `resolved` in `folder`; blocks until every process is gone and the status is written.

    Takes the folder over and closes it. Whatever happens to the ranks is a state, not an exception.

    Args:
        resolved: the run.
        folder: a fresh folder of the store.
        stop: set it (Ctrl-C) to end the run as interrupted.
        on_step: called in this thread with the number of steps that all ranks have finished.
        worker_module: what each rank runs, as `python -m`.
        limits: times of the watch.
        code: what the ranks must import; None is the code of this process.
        launcher: what starts the processes.

    Raises:
        StoreFullError: the status could not be written; every process is gone all the same.
        StoreGoneError: the same, as somebody has removed the folder.
    """
    order = Order(resolved, folder.path, code or own_code(), worker_module)
    ranks = resolved.launch.ranks
    with folder:
        folder.write_environment(collect_environment(order))
        expect_code(order)
        data = () if resolved.data.path is None else (str(Path(resolved.data.path).absolute()),)
        inputs = {path: digest_now(path) for path in data}
        try:
            ending = _run(order, folder, launcher, stop=stop, on_step=on_step, limits=limits)
        except Exception as error:
            _write_final(folder, Ending("crashed", f"the harness failed: {error!r}"), None, inputs)
            raise
        ending = _unless_unstable(folder, ending)
        proofs = read_proofs(folder, ranks)
        for proof in proofs.values():
            inputs |= proof.pop("imported", {})
        keep_proofs(folder, proofs)
        return _write_final(folder, ending, verdict(proofs, ranks), inputs)


def _run(
    order: Order,
    folder: RunFolder,
    launcher: Launcher,
    *,
    stop: threading.Event,
    on_step: Callable[[int], None] | None,
    limits: Limits,
) -> Ending:
    """Start the job, wait, end whatever is left, and say what happened."""
    launch, steps = order.resolved.launch, order.resolved.train.steps
    heartbeat = Heartbeat(folder.path, launch.ranks, time.monotonic())
    job = launcher.start(order)
    ending: Ending | None = None
    try:
        ending = Watch(job, heartbeat, launch, limits).wait(stop, on_step)
    except KeyboardInterrupt:
        stop.set()
        ending = Ending("interrupted", "interrupted by the user (Ctrl-C)")
    finally:
        if ending is not None and ending.state in STOPPED:
            # Now: an impatient user may kill this process before the ranks have ended.
            with contextlib.suppress(StoreFullError, StoreGoneError):
                folder.write_status(folder.status.model_copy(update={"reason": ending.reason}))
        job.cancel(limits.grace_seconds)
    end = job.wait(0.0)
    if ending is not None:
        ending = replace(ending, exit_code=end.exit_code)
    elif end.state is not None:
        return Ending(end.state, end.detail, None, end.exit_code)
    else:
        if not isinstance(launcher, LocalLauncher):
            _await_late_files(folder, heartbeat, steps if end.exit_code == 0 else None, limits)
        evidence = gather_evidence(folder, end, steps=heartbeat.steps, steps_expected=steps)
        ending = classify(evidence)
    if ending.state in ("hang", "timeout") or ending.exit_code == -signal.SIGABRT:
        # A rank stood still, or a watchdog ended it: what each had issued.
        issued = desync(folder.logs_path)
        return replace(ending, reason="; ".join(filter(None, (ending.reason, issued))))
    return ending


def _await_late_files(
    folder: RunFolder, heartbeat: Heartbeat, steps: int | None, limits: Limits
) -> None:
    """Wait for what other machines have written.

    [Note: late files] A client of NFS or Lustre caches listings and attributes for up to a minute:
    a file that was closed elsewhere may be missing here. An absence is believed after that minute.

    Args:
        folder: of the run.
        heartbeat: counts steps in its files.
        steps: of every rank of a run that went well; None for one that failed, whose ranks say why.
        limits: with the longest wait.
    """

    def complete() -> bool:
        heartbeat.poll(time.monotonic())
        if steps is None:
            return bool(folder.read_failures()) or (folder.logs_path / OUTCOME_FILE).exists()
        return (
            set(heartbeat.steps) == {steps}
            and (folder.path / MEMORY).exists()
            and "meters" in folder.read_runtime()
        )

    deadline = time.monotonic() + limits.late_seconds
    while not complete() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _unless_unstable(folder: RunFolder, ending: Ending) -> Ending:
    """`unstable` instead of `ok` where no steady state was reached; keeps the summary."""
    if ending.state != "ok":
        return ending
    from bench.derive.summary import summarise

    status = folder.status.model_copy(update={"state": "ok"})
    record = replace(read_record(folder.path, folder.run_id), status=status)
    if record.damage:
        return replace(ending, state="crashed", reason="; ".join(record.damage))
    summary = summarise(record)
    with contextlib.suppress(StoreFullError):
        folder.write_summary(summary)
    if not status.comparable_in_time or summary.steady is None or summary.steady.stable:
        return ending
    return replace(ending, state="unstable", reason=summary.steady.reason)


def _write_final(
    folder: RunFolder, ending: Ending, proof: Verdict | None, inputs: dict[str, str]
) -> RunStatus:
    status = folder.status.model_copy(
        update={
            "state": ending.state,
            "reason": ending.reason,
            "failed_rank": ending.failed_rank,
            "exit_code": ending.exit_code,
            "ended_utc": utc_now(),
            "code_proof": proof,
            "code": code_with_inputs(folder.status.code, inputs),
            "inputs": inputs,
        }
    )
    folder.finish(status)
    return folder.status
