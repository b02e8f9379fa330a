"""What a run that is going on has said so far, read from the ends of its files.

The ranks are never asked: they write a line per step anyway, and are not disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.launch.code_proof import proven_ranks
from bench.record import StepSample
from bench.store import samples
from bench.store.layout import RUNTIME

_TAIL_BYTES_PER_RANK = 8192
_TAIL_BYTES = 2 * 2**20
_RECENT_STEPS = 20


@dataclass(frozen=True)
class LiveRun:
    """Numbers of the steps that all ranks have finished; None as long as there is no such step.

    step: the newest of them, from 1. milliseconds: median of the last twenty, each as long as its
    slowest rank. tokens_per_second: all ranks together. loss: mean over ranks. memory_bytes: of the
    largest rank, its device's allocator (`device`) or the process as a whole.
    """

    step: int = 0
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
    on_device: bool = False
    waits_for: str = ""


def read_live_run(folder: Path, ranks: int, steps: int) -> LiveRun:
    """Look at the files of the run in `folder` once; what is missing or cut off is left out."""
    tails = _tails(folder, ranks)
    common = set.intersection(*(set(tail) for tail in tails)) if tails else set()
    if not common:
        return LiveRun(waits_for=_start(folder, ranks))
    newest = max(common)
    recent = [max(tail[n].milliseconds for tail in tails) for n in sorted(common)[-_RECENT_STEPS:]]
    last = [tail[newest] for tail in tails]
    milliseconds = median(recent)
    device = [one.device_peak_bytes for one in last if one.device_peak_bytes is not None]
    tokens = sum(one.tokens for one in last)
    losses = [one.loss for one in last if one.loss is not None]
    return LiveRun(
        newest,
        milliseconds,
        tokens / milliseconds * 1e3 if tokens and milliseconds else None,
        sum(losses) / len(losses) if losses else None,
        max(device or [one.rss_bytes for one in last]),
        bool(device),
        "the ranks to write their records" if newest >= steps else "",
    )


def _tails(folder: Path, ranks: int) -> list[dict[int, StepSample]]:
    """The last samples of each rank by step; empty while a rank has none."""
    files = sorted(folder.glob(samples.GLOB))
    found: dict[int, dict[int, StepSample]] = {}
    for file in files:
        share = min(_TAIL_BYTES_PER_RANK * ranks, _TAIL_BYTES) // len(files)
        found |= samples.last_samples(file, max(share, _TAIL_BYTES_PER_RANK))
    return [found.get(rank, {}) for rank in range(ranks)]


def _start(folder: Path, ranks: int) -> str:
    """What a run without a step is waiting for, by the files that are there."""
    if (folder / RUNTIME).exists():
        return "the first step"
    proven = proven_ranks(folder)
    behind = [rank for rank in range(ranks) if rank not in proven]
    if not behind:
        return "the ranks to find each other and to build the model"
    if len(behind) == ranks:
        return "the ranks to start and to load torch"
    more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
    return f"rank {behind[0]}{more} to load torch"
