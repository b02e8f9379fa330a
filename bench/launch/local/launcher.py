"""`LocalLauncher`: one agent on this machine, which starts the ranks and dies with this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import psutil

from bench.launch.command import agent_command, rank_environment
from bench.launch.local.process_tree import (
    ask_for_stacks,
    end_run,
    out_of_memory_kills,
    process_state,
    rank_states,
    start_detached,
)
from bench.launch.protocol import JobState, Order, Symptoms
from bench.store.layout import LOGS

AGENT_LOG = "agent.log"


class LocalLauncher:
    """Runs on this machine; ranks die with this process ([Note: death of the launcher])."""

    def start(self, order: Order) -> LocalJob:
        """Start the agent."""
        return LocalJob(order)


class LocalJob:
    """The agent of one run, everything below it, and a thread that waits for its end.

    variables: for the environment of the agent, added to those of the run. command: what starts it.
    """

    def __init__(
        self,
        order: Order,
        variables: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._order = order
        self._kills_before = out_of_memory_kills()
        self._agent = start_detached(
            command or agent_command(order),
            order.run_dir / LOGS / AGENT_LOG,
            {**rank_environment(order, os.environ), **(variables or {})},
        )
        self._ended = threading.Event()
        threading.Thread(target=self._wait_for_agent, daemon=True).start()

    def _wait_for_agent(self) -> None:
        self._agent.wait()
        self._ended.set()

    def wait(self, seconds: float) -> JobState:
        """Sleeps in the kernel: nothing runs during a measurement."""
        if not self._ended.wait(seconds) and self._agent.poll() is None:
            return JobState("running")
        kills = out_of_memory_kills() - self._kills_before
        return JobState("ended", exit_code=self._agent.returncode, kernel_oom_kills=kills)

    def cancel(self, grace_seconds: float) -> None:
        """End the agent, all its descendants, and strays of the same run."""
        end_run(self._agent, self._order.run_dir, grace_seconds)

    def symptoms(self) -> Symptoms:
        """States of the processes, and the load of the machine."""
        load = f"load {os.getloadavg()[0]:.1f} on {psutil.cpu_count() or 1} cores"
        return Symptoms(rank_states(self._agent.pid), process_state(self._agent.pid), load)

    def ask_for_stacks(self) -> None:
        """By SIGUSR1, which every rank answers into its log."""
        ask_for_stacks(self._agent.pid)
