"""Progress of a sweep: bars on a terminal, plain lines everywhere else.

What a run has reached is read from the ends of its files. The ranks are not disturbed: they write a
line per step anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TextIO

from bench.cli import console
from bench.launch.code_proof import proven_ranks
from bench.record import FINISHED_GOOD, StepSample
from bench.store import samples
from bench.store.layout import RUNTIME
from reports.renderers import quantity
from reports.renderers.printable import printable
from sweeps.progress import (
    BlockLost,
    Progress,
    Remark,
    RunEnded,
    RunStarted,
    StepReached,
    Subscriber,
    SweepStarted,
)
from sweeps.resume import PastRun

_LOOKS_PER_SECOND = 2
"""Every look costs the machine that is being measured about a millisecond."""
_PLAIN_LINE_EVERY_SECONDS = 30.0
_BAR_WIDTH = 16
_ESTIMATED_OVER_SECONDS = 24 * 3600.0


@contextlib.contextmanager
def progress_display(stream: TextIO) -> Iterator[Subscriber]:
    """A subscriber that shows progress on `stream`; a stream that breaks is written to no more."""
    broken = False

    def guarded(event: Progress) -> None:
        """A display that fails must not end a measurement."""
        nonlocal broken
        if not broken:
            try:
                publish(event)
            except (OSError, ValueError):
                broken = True

    with _live(stream) if stream.isatty() else contextlib.nullcontext(plain(stream)) as publish:
        yield guarded


def plain(stream: TextIO) -> Subscriber:
    """A line when a run starts and ends, and one now and then while it goes on."""
    running: dict[str, RunStarted] = {}
    printed = time.monotonic()

    def publish(event: Progress) -> None:
        nonlocal printed
        line = _line(event, running)
        is_silent = time.monotonic() - printed >= _PLAIN_LINE_EVERY_SECONDS
        if isinstance(event, StepReached) and is_silent:
            run = running[event.run_id]
            parts = (f"step {event.step} of {run.steps}", numbers_text(_look(run)))
            line = f"{_title(run, run)}  {', '.join(filter(None, parts))}"
        if line is not None:
            printed = time.monotonic()
            print(console.harmless(line), file=stream, flush=True)

    return publish


def _line(event: Progress, running: dict[str, RunStarted]) -> str | None:
    """None for an event without one. running: the runs that are going on; kept up here."""
    match event:
        case SweepStarted():
            to_do = "blocks until the time is spent"
            if event.to_run is not None:
                to_do = f"{quantity.counted(event.to_run, 'run')} to do"
            before = f"{event.done_before} done before, {event.failed_before} failed before"
            return "\n".join((f"{event.sweep}: {to_do}, {before}", *event.again))
        case RunStarted():
            running[event.run_id] = event
            return f"{_title(event, event)} ..."
        case RunEnded():
            started = running.pop(event.run.run_id, None)
            text = f"{event.run.state} in {event.seconds:.1f} s"
            if event.run.reason and event.run.state != "ok":
                text += f": {event.run.reason}"
            elif numbers := numbers_text(_look(started)) if started else "":
                text += f": {numbers}"
            return f"{_title(event, event.run)}  {text}"
        case BlockLost():
            what = "started again" if event.again else "given up, and its cell with it"
            return (
                f"{event.cell}: block {event.block} lost, arm {event.arm} {event.state}"
                f" (attempt {event.attempt}): {what}"
            )
        case Remark():
            return event.text
        case StepReached():
            return None


def _look(run: RunStarted) -> LiveRun:
    return read_live_run(run.folder, run.ranks, run.steps)


def _title(event: RunStarted | RunEnded, run: RunStarted | PastRun) -> str:
    return f"[{event.position}/{event.total}] {_name(run)}"


def _name(run: RunStarted | PastRun) -> str:
    which = [f"repeat {run.repeat}"] if run.repeat or run.arm else []
    which += [f"arm {run.arm}"] if run.arm else []
    return f"{run.cell} ({', '.join(which)})" if which else run.cell


def numbers_text(run: LiveRun) -> str:
    """`98.2 ms per step, 5,210 tokens/s, loss 6.1234, memory 512.0 MiB`; empty without a step."""
    if run.milliseconds is None:
        return ""
    memory = "device memory" if run.on_device else "memory"
    parts = [f"{quantity.significant(run.milliseconds, 3)} ms per step"]
    if run.loss is not None:
        parts.append(f"{quantity.significant(run.tokens_per_second, 4)} tokens/s")
        parts.append(f"loss {quantity.significant(run.loss, 5)}")
    return ", ".join((*parts, f"{memory} {quantity.binary_bytes(run.memory_bytes)}"))


@contextlib.contextmanager
def _live(stream: TextIO) -> Iterator[Subscriber]:
    """Two bars, of the sweep and of the run that began last, and below them its numbers.

    Above them stays a line for each run that has ended.
    """
    # rich itself leaves colours out where NO_COLOR is set.
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    running: dict[str, RunStarted] = {}

    class Display(Bars):
        def get_renderables(self) -> Iterator[RenderableType]:
            if running:
                now = _look(next(reversed(running.values())))
                self.update(of_run, completed=now.step)
                yield from super().get_renderables()
                waiting = f"waiting for {now.waits_for}" if now.waits_for else ""
                news = ", ".join(filter(None, (waiting, numbers_text(now))))
                yield Text(f"  {news}", no_wrap=True, overflow="ellipsis")

    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[noun]} {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(_BAR_WIDTH),
        TimeRemainingColumn(),
    )
    screen = Console(file=stream, highlight=False)
    bars = Display(
        *columns,
        console=screen,
        refresh_per_second=_LOOKS_PER_SECOND,
        transient=True,
        speed_estimate_period=_ESTIMATED_OVER_SECONDS,
    )
    of_sweep, of_run = bars.add_task("", total=1, noun="runs"), bars.add_task("", noun="step")

    def publish(event: Progress) -> None:
        line = _line(event, running)
        if isinstance(event, SweepStarted):
            bars.reset(of_sweep, total=event.to_run or 1, description=printable(event.sweep))
        elif isinstance(event, RunStarted):
            bars.update(of_sweep, total=event.total)
            bars.reset(of_run, total=event.steps, description=printable(_name(event)))
        elif isinstance(event, RunEnded):
            bars.advance(of_sweep)
        if line is not None and not isinstance(event, RunStarted):
            screen.print(console.harmless(line), style=_colour(event), markup=False)

    with bars:
        yield publish


def _colour(event: Progress) -> str | None:
    if isinstance(event, RunEnded):
        return "green" if event.run.state in FINISHED_GOOD else "red"
    warns = isinstance(event, BlockLost) or (isinstance(event, Remark) and event.is_warning)
    return "yellow" if warns else None


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
    device = [sample.device_peak_bytes for sample in last if sample.device_peak_bytes is not None]
    tokens = sum(sample.tokens for sample in last)
    losses = [sample.loss for sample in last if sample.loss is not None]
    return LiveRun(
        newest,
        milliseconds,
        tokens / milliseconds * 1e3 if tokens and milliseconds else None,
        sum(losses) / len(losses) if losses else None,
        max(device or [sample.rss_bytes for sample in last]),
        bool(device),
        "the ranks to write their records" if newest >= steps else "",
    )


def _tails(folder: Path, ranks: int) -> list[dict[int, StepSample]]:
    """The last samples of each rank by step; empty while a rank has none."""
    files = sorted(folder.glob(samples.GLOB))
    by_rank: dict[int, dict[int, StepSample]] = {}
    for file in files:
        share = min(_TAIL_BYTES_PER_RANK * ranks, _TAIL_BYTES) // len(files)
        by_rank |= samples.last_samples(file, max(share, _TAIL_BYTES_PER_RANK))
    return [by_rank.get(rank, {}) for rank in range(ranks)]


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
