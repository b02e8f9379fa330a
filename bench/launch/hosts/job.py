"""`HostsJob`: the agents of one run, on this machine and on others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.launch.hosts.channel import Channel
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import JobState, Order, Symptoms

# Ranks elsewhere notice a failed one by themselves, and say more about it than their end does.
_LAST_WORDS_SECONDS = 5.0
_CANCEL_SECONDS = 15.0


@dataclass(eq=False)
class Host:
    """Another host. ends: exit code of its agent by run folder. why: it has left, or was lost.

    process: a name of its process, by which it is known when it comes again.
    """

    name: str
    channel: Channel
    process: str = ""
    ends: dict[str, int] = field(default_factory=dict)
    why: str | None = None

    @property
    def lost(self) -> str:
        """Why nothing can be run there; empty as long as it can."""
        return "" if self.why is None else f"host {self.name} was lost: {self.why}"


class HostsJob:
    """The agents of one run: this machine's, and one on each of `others`."""

    def __init__(
        self, order: Order, local: LocalJob, others: Sequence[Host], changed: threading.Condition
    ) -> None:
        self._order = order
        self._run = str(order.run_dir)
        self._local = local
        self._others = others
        self._changed = changed
        self._broken_seconds: float | None = None

    @property
    def id(self) -> str:
        """Process id of this machine's agent."""
        return self._local.id

    def wait(self, seconds: float) -> JobState:
        """Ended with all agents; or with the first that fails, a moment later."""
        local = self._local.wait(seconds)
        if local.phase == "ended":
            with self._changed:
                self._changed.wait_for(self._all_over, seconds)
        over = self._all_over() and local.phase == "ended"
        broken = self._first_failure(local)
        now = time.monotonic()
        if broken is not None and self._broken_seconds is None:
            self._broken_seconds = now
        late = self._broken_seconds is not None and now > self._broken_seconds + _LAST_WORDS_SECONDS
        if not over and not late:
            return JobState("running")
        return broken or local

    def _all_over(self) -> bool:
        return all(host.why is not None or self._run in host.ends for host in self._others)

    def _first_failure(self, local: JobState) -> JobState | None:
        if local.phase == "ended" and local.exit_code != 0:
            return local
        for host in self._others:
            if host.why is not None and self._run not in host.ends:
                return JobState("ended", host.lost, 1, "interrupted")
            code = host.ends.get(self._run, 0)
            if code != 0:
                return JobState("ended", f"on {host.name}", code)
        return None

    def cancel(self, grace_seconds: float) -> None:
        """Here and on every other host."""
        for host in self._others:
            host.channel.send({"cancel": self._run, "grace_seconds": grace_seconds})
        self._local.cancel(grace_seconds)
        with self._changed:
            self._changed.wait_for(self._all_over, grace_seconds + _CANCEL_SECONDS)

    def symptoms(self) -> Symptoms:
        """Of this machine's processes, and where the others are."""
        seen, each = self._local.symptoms(), self._order.resolved.launch.ranks_per_node
        places = {
            rank: f"on {host.name}"
            for node, host in enumerate(self._others, start=1)
            for rank in range(node * each, (node + 1) * each)
        }
        return Symptoms({**seen.ranks, **places}, seen.agent, seen.load)

    def ask_for_stacks(self) -> None:
        """Here and on every other host."""
        self._local.ask_for_stacks()
        for host in self._others:
            host.channel.send({"stacks": self._run})
