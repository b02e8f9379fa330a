"""Which of several failed ranks broke first.

[Note: who broke first] Ranks fail together: the one that broke, those that lost it in a collective,
and those that the agent ended afterwards. Two times are known of a rank: when it reported an
exception, before it ended, and when its process was gone. A peer's exception can only follow the
death that caused it, but its report may be noticed sooner than that death: what reads as the loss
of a peer is therefore a cause only if nobody else can be. SIGTERM and SIGKILL after the first death
are the agent's own. Without times (an arm with an older agent) kinds alone decide.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Sent by torchrun to the survivors.
_CLOSING = frozenset({signal.SIGTERM, signal.SIGKILL})
# Raised by a communication watchdog, or closing: may be a consequence.
_SOFT = frozenset({signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGHUP})
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|closed pair|pair closure|connection (?:was )?likely"
    r"|connection refused|connection (?:is )?(?:closed|lost|aborted)|got 0 bytes|recvvalue"
    r"|sendbytes|timed out waiting|socket timeout|distnetworkerror|storetimeout"
    r"|remote process exited|ncclremoteerror|nccl communicator was aborted|watchdog",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """What is known of one rank that failed.

    report: what it wrote before it ended, None if it said nothing. exit_code: -N for signal N, None
    if nobody saw it end. died_seconds: Unix time of its death, None where the kernel did not tell.
    """

    rank: int
    report: Mapping[str, Any] | None = None
    exit_code: int | None = None
    died_seconds: float | None = None

    @property
    def reported_seconds(self) -> float:
        """When it wrote its report; infinite where it did not say."""
        seconds = (self.report or {}).get("time_seconds")
        return float(seconds) if isinstance(seconds, int | float) else math.inf

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, None for an exit of its own."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def lost_a_peer(self) -> bool:
        """It reported nothing but that another rank was gone."""
        return self.report is not None and bool(_LOST_PEER.search(str(self.report.get("message"))))

    @property
    def first_seconds(self) -> float:
        """When it is first known to have failed; infinite where nobody knows."""
        died = math.inf if self.died_seconds is None else self.died_seconds
        return min(self.reported_seconds, died)


def first_to_break(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that the others follow from; None without failures ([Note: who broke first])."""
    deaths = [failure.died_seconds for failure in failures if failure.died_seconds is not None]
    first_death = min(deaths, default=math.inf)

    def ended_by_agent(failure: RankFailure) -> bool:
        if failure.report is not None or failure.signal not in _CLOSING:
            return False
        if deaths:
            return failure.died_seconds is None or failure.died_seconds > first_death
        return failure.signal == signal.SIGTERM

    return min(
        failures,
        key=lambda failure: (
            ended_by_agent(failure),
            failure.lost_a_peer,
            failure.first_seconds if deaths else 0.0,
            _kind(failure),
            failure.first_seconds,
            failure.rank,
        ),
        default=None,
    )


def _kind(failure: RankFailure) -> int:
    """Rank of the evidence where no time decides: hard signal, silent exit, exception, soft one."""
    if failure.report is not None:
        return 2
    if failure.signal is None:
        return 1
    return 3 if failure.signal in _SOFT else 0
