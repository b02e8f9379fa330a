"""How an agent on another machine learns that its run is to end: by files in the run folder.

What started it there (ssh, kubectl exec, mpirun) may be killed here without a word to it, so the
launcher keeps writing a file as long as it lives, and writes another one to end the run. Both are
in the run folder, which every machine of a run sees anyway.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from bench.launch.local.process_tree import descendants
from bench.store.layout import LOGS

WATCHED_VARIABLE: Final = "MFSDP_BENCH_LAUNCHER_IS_ELSEWHERE"
SIGN_OF_LIFE_SECONDS: Final = 10.0
# A client of NFS may see a file as it was a minute ago.
_GONE_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 1.0
# For what this agent writes about its ranks.
_LAST_WORDS_SECONDS: Final = 5.0


class RunFiles:
    """What the launcher tells the agents of a run. life: a number that grows while it is there."""

    def __init__(self, run_dir: Path) -> None:
        self._life = run_dir / LOGS / "launcher.life"
        self._end = run_dir / LOGS / "launcher.end"
        self._stacks = run_dir / LOGS / "launcher.stacks"

    def live(self) -> None:
        """A sign of life."""
        self._life.write_text(f"{time.time()}\n", encoding="utf-8")

    def end(self, grace_seconds: float) -> None:
        """End the run everywhere; what is still there after `grace_seconds` is killed."""
        self._end.write_text(f"{grace_seconds}\n", encoding="utf-8")

    def ask_for_stacks(self) -> None:
        """Have every rank write its stacks."""
        self._stacks.write_text(f"{time.time()}\n", encoding="utf-8")

    def remove(self) -> None:
        """Once every agent is gone."""
        for file in (self._life, self._end, self._stacks):
            file.unlink(missing_ok=True)

    def watch(self, ask_for_stacks: Callable[[], None]) -> None:
        """In the agent: do what the files say, until this process ends."""
        seen, stacks, since = "", "", time.monotonic()
        while True:
            time.sleep(_LOOK_SECONDS)
            grace = _text(self._end)
            life = _text(self._life)
            if life != seen:
                seen, since = life, time.monotonic()
            if grace or time.monotonic() - since > _GONE_SECONDS:
                end_of_agent(float(grace or 0.0))
            if (wanted := _text(self._stacks)) != stacks:
                stacks = wanted
                ask_for_stacks()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def end_of_agent(grace_seconds: float) -> None:
    """SIGTERM to this process, which ends its ranks; then SIGKILL to all that is left."""
    ranks = descendants(os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)
    _, left = psutil.wait_procs(ranks, timeout=grace_seconds)
    for process in left:
        process.kill()
    time.sleep(_LAST_WORDS_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
