"""Time and bytes of checkpoints that a run saves on its way."""

from __future__ import annotations

import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.engines.protocol import Engine


class CheckpointMeter:
    """Saves after every `every`-th step, between two steps, so outside of their times.

    Each checkpoint has a folder of its own below `folder`. A checkpoint goes when the next one is
    complete, the last one with the run: what is kept is what saving cost. The time is this rank's,
    from the call to its return, on a host that caches writes.
    """

    def __init__(self, engine: Engine, folder: Path, every: int, *, rank: int) -> None:
        self._engine = engine
        self._folder = folder
        self._every = every
        self._clears = rank == 0
        self._latest: Path | None = None
        self._saves: list[dict[str, Any]] = []

    def after_step(self, step: int) -> None:
        """Save, if it is time."""
        if step % self._every:
            return
        target = self._folder / f"step-{step}"
        start = perf_counter()
        self._engine.save_checkpoint(target)
        milliseconds = (perf_counter() - start) * 1e3
        if not self._clears:
            return
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        self._saves.append({"step": step, "milliseconds": milliseconds, "bytes": size})
        if self._latest is not None:
            shutil.rmtree(self._latest, ignore_errors=True)
        self._latest = target

    def report(self) -> dict[str, Any]:
        """`checkpoints.json` of rank 0: bytes are those of all ranks, as the folder holds them."""
        return {"every_steps": self._every, "saves": self._saves}

    def discard(self) -> None:
        """Delete what is left; the checkpoint of the last step was complete on every rank."""
        shutil.rmtree(self._folder, ignore_errors=True)
