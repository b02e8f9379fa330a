"""`launch`: one run on this machine, from its folder to its final status."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.launch.code_proof import Verdict, expect_code, keep_proofs, read_proofs, verdict
from bench.launch.command import WORKER_MODULE, agent_command, rank_environment
from bench.launch.environment import collect_environment
from bench.launch.heartbeat import Heartbeat
from bench.launch.kernel_memory import out_of_memory_kills
from bench.launch.outcome import Outcome, classify, gather_evidence
from bench.launch.process_tree import end_run
from bench.launch.rank_code import RankCode, own_code
from bench.launch.watch import Ending, Limits, Watch
from bench.record import RunStatus
from bench.spec import ResolvedRun
from bench.store import RunFolder, StoreFullError
from bench.store.reading import read_record
from bench.store.run_folder import utc_now

AGENT_LOG = "agent.log"
_DEFAULT_LIMITS = Limits()


def launch(
    resolved: ResolvedRun,
    folder: RunFolder,
    *,
    stop: threading.Event,
    on_step: Callable[[int], None] | None = None,
    worker_module: str = WORKER_MODULE,
    limits: Limits = _DEFAULT_LIMITS,
    code: RankCode | None = None,
) -> RunStatus:
    """Run `resolved` in `folder`; blocks until every process is gone and the status is written.

    Takes the folder over and closes it. Whatever happens to the ranks is a state, not an exception.

    Args:
        resolved: the run.
        folder: a fresh folder of the store.
        stop: set it (Ctrl-C) to end the run as interrupted.
        on_step: called in this thread with the number of steps that all ranks have finished.
        worker_module: what each rank runs, as `python -m`.
        limits: times of the launcher.
        code: what the ranks must import; None is the code of this process.

    Raises:
        StoreFullError: the status could not be written; every process is gone all the same.
    """
    code = code or own_code()
    ranks = resolved.launch.ranks
    with folder:
        folder.write_environment(collect_environment(resolved, folder.path, code))
        expect_code(resolved, folder, code, worker_module)
        try:
            agent = _Agent(agent_command(resolved, folder.path, code), worker_module, code)
            outcome = _run(resolved, folder, agent, stop=stop, on_step=on_step, limits=limits)
        except Exception as error:
            _write_final(folder, Outcome("crashed", f"the harness failed: {error!r}"), None)
            raise
        outcome = _judged(folder, outcome)
        proofs = read_proofs(folder, ranks)
        # The reader falls back to runtime.json, so this copy must not cost a full disk the status.
        with contextlib.suppress(StoreFullError):
            environment = collect_environment(resolved, folder.path, code)
            folder.write_environment(environment | {"runtime": keep_proofs(folder, proofs)})
        return _write_final(folder, outcome, verdict(proofs, ranks))


@dataclass(frozen=True)
class _Agent:
    """How the agent is started."""

    command: list[str]
    worker_module: str
    code: RankCode


def _run(
    resolved: ResolvedRun,
    folder: RunFolder,
    how: _Agent,
    *,
    stop: threading.Event,
    on_step: Callable[[int], None] | None,
    limits: Limits,
) -> Outcome:
    """Start the agent, wait, end whatever is left, and say what happened."""
    kills_before = out_of_memory_kills()
    ranks = range(resolved.launch.ranks)
    heartbeat = Heartbeat([folder.steps_path(rank) for rank in ranks], time.monotonic())
    agent = _start_agent(resolved, folder, how)
    ended = threading.Event()
    threading.Thread(target=_wait_for, args=(agent, ended), daemon=True).start()
    ending: Ending | None = None
    try:
        watch = Watch(agent.pid, heartbeat, resolved.launch, limits)
        ending = watch.wait(ended, stop, on_step)
    except KeyboardInterrupt:
        stop.set()
        ending = Ending("interrupted", "stopped by Ctrl-C")
    finally:
        end_run(agent, folder.path, limits.grace_seconds)
    if ending is not None:
        return Outcome(ending.state, ending.reason, ending.failed_rank, agent.returncode)
    heartbeat.poll(time.monotonic())
    evidence = gather_evidence(
        folder,
        agent.returncode,
        steps=heartbeat.steps,
        steps_expected=resolved.train.steps,
        kernel_oom_kills=out_of_memory_kills() - kills_before,
    )
    return classify(evidence)


def _start_agent(resolved: ResolvedRun, folder: RunFolder, how: _Agent) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C on the terminal reaches the launcher alone."""
    with (folder.logs_path / AGENT_LOG).open("ab") as log:
        return subprocess.Popen(
            how.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(resolved, folder.path, os.environ, how.code, how.worker_module),
            start_new_session=True,
        )


def _wait_for(agent: subprocess.Popen[bytes], ended: threading.Event) -> None:
    agent.wait()
    ended.set()


def _judged(folder: RunFolder, outcome: Outcome) -> Outcome:
    """`unstable` instead of `ok` where no steady state was reached; keeps the summary beside it."""
    if outcome.state != "ok":
        return outcome
    from bench.derive.summary import summarise

    status = folder.status.model_copy(update={"state": "ok"})
    record = replace(read_record(folder.path, folder.run_id), status=status)
    summary = summarise(record)
    with contextlib.suppress(StoreFullError):
        folder.write_summary(summary)
    if not status.comparable_in_time or summary.steady is None or summary.steady.stable:
        return outcome
    return replace(outcome, state="unstable", reason=summary.steady.reason)


def _write_final(folder: RunFolder, outcome: Outcome, proof: Verdict | None) -> RunStatus:
    status = folder.status.model_copy(
        update={
            "state": outcome.state,
            "reason": outcome.reason,
            "failed_rank": outcome.failed_rank,
            "exit_code": outcome.exit_code,
            "ended_utc": utc_now(),
            "code_proof": proof,
        }
    )
    folder.write_status(status)
    return status
