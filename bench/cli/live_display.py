"""Progress of a sweep: a live display on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from threading import RLock
from typing import TYPE_CHECKING, TextIO

from bench.cli import console
from bench.cli.live_run import LiveRun, read_live_run
from bench.cli.remaining_time import RemainingTime, duration
from bench.record import FINISHED_GOOD
from reports.renderers import quantity
from reports.renderers.printable import printable
from sweeps.progress import (
    BlockLost,
    Progress,
    Remark,
    RunEnded,
    RunStarted,
    StepReached,
    Stopping,
    Subscriber,
    SweepStarted,
    SweepStopped,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LOOKS_PER_SECOND = 2
"""Every look costs the machine that is being measured about a millisecond."""
_PLAIN_LINE_EVERY_SECONDS = 30.0
_SILENT_STEPS = 5
_SILENT_SECONDS = 5.0
_BAR_WIDTH = 16


@contextlib.contextmanager
def progress_display(stream: TextIO) -> Iterator[Subscriber]:
    """A subscriber that shows progress on `stream`; a stream that breaks is written to no more."""
    if stream.isatty():
        with _live(stream) as publish:
            yield _unbreakable(publish)
    else:
        yield _unbreakable(PlainLines(stream))


def _unbreakable(publish: Subscriber) -> Subscriber:
    """A display that fails must not end a measurement."""
    broken = False

    def guarded(event: Progress) -> None:
        nonlocal broken
        if broken:
            return
        try:
            publish(event)
        except (OSError, ValueError):
            broken = True

    return guarded


class _LiveRun:
    """A run that is going on, and what was seen of it."""

    def __init__(self, started: RunStarted) -> None:
        self.started = started
        self._begun = self._changed = time.monotonic()
        self._newest = LiveRun()

    def look(self) -> LiveRun:
        newest = read_live_run(self.started.folder, self.started.ranks, self.started.steps)
        if newest != self._newest:
            self._newest, self._changed = newest, time.monotonic()
        return newest

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def silent_seconds(self) -> float:
        """Seconds without news, 0 as long as that is nothing to speak of."""
        silent = time.monotonic() - self._changed
        usual = _SILENT_STEPS * (self._newest.milliseconds or 0) / 1e3
        return silent if silent > max(_SILENT_SECONDS, usual) else 0.0


class _LiveRuns:
    """The runs that are going on: one, or several side by side. Also the estimate for the sweep."""

    def __init__(self) -> None:
        self._runs: dict[str, _LiveRun] = {}
        self._remaining = RemainingTime()

    def begin(self, event: RunStarted) -> None:
        self._runs[event.run_id] = _LiveRun(event)
        self._remaining.run_started(event.cell, event.steps, event.total - event.position)

    def end(self, event: RunEnded) -> LiveRun:
        """The last numbers of the run."""
        run = self._runs.pop(event.run_id, None)
        self._remaining.run_ended(event.seconds)
        return LiveRun() if run is None else run.look()

    def of(self, run_id: str = "") -> _LiveRun | None:
        """The run of this id, else the one that began last."""
        return self._runs.get(run_id) or next(reversed(self._runs.values()), None)

    def left(self, run: _LiveRun, now: LiveRun) -> tuple[str, str]:
        """How long the run, and the whole sweep, will still take; empty where unknown."""
        if len(self._runs) > 1:
            return "", ""
        seen = run.seconds, now.step, now.milliseconds
        of_run, sweep = self._remaining.of_run(*seen), self._remaining.of_sweep(*seen)
        return (
            "" if of_run is None else f"{duration(of_run)} left",
            "" if sweep is None else f"about {duration(sweep)} left",
        )


def numbers_text(run: LiveRun) -> str:
    """`98.2 ms per step, 5,210 tokens/s, loss 6.1234, memory 512.0 MiB`; empty without a step.

    Of a run that trains nothing the time and the memory.
    """
    if run.milliseconds is None:
        return ""
    memory = "device memory" if run.on_device else "memory"
    parts = [f"{quantity.significant(run.milliseconds, 3)} ms per step"]
    if run.loss is not None:
        parts.append(f"{quantity.significant(run.tokens_per_second, 4)} tokens/s")
        parts.append(f"loss {quantity.significant(run.loss, 5)}")
    return ", ".join((*parts, f"{memory} {quantity.binary_bytes(run.memory_bytes)}"))


class PlainLines:
    """A line when a run starts and ends, and one now and then while it goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._runs = _LiveRuns()
        self._said = time.monotonic()

    def __call__(self, event: Progress) -> None:
        """Print the event if it deserves a line."""
        line: str | None
        if isinstance(event, StepReached):
            line = self._step_line(event)
        elif isinstance(event, RunEnded):
            line = plain_line(event, self._runs.end(event))
        else:
            line = plain_line(event)
        if isinstance(event, RunStarted):
            self._runs.begin(event)
        if line is not None:
            self._said = time.monotonic()
            print(console.harmless(line), file=self._stream, flush=True)

    def _step_line(self, event: StepReached) -> str | None:
        run = self._runs.of(event.run_id)
        if run is None or time.monotonic() - self._said < _PLAIN_LINE_EVERY_SECONDS:
            return None
        now = run.look()
        parts = [
            f"step {event.step} of {event.steps}",
            numbers_text(now),
            self._runs.left(run, now)[1],
        ]
        return f"[{run.started.position}/{run.started.total}] {_name(run.started)}  " + ", ".join(
            part for part in parts if part
        )


def plain_line(event: Progress, last: LiveRun | None = None) -> str | None:
    """The text of an event, None for one that has none; `last`: numbers of a run that ended."""
    if isinstance(event, SweepStarted):
        to_do = "blocks until all is decided"
        if event.to_run is not None:
            to_do = f"{quantity.counted(event.to_run, 'run')} to do"
        first = (
            f"{event.sweep}: {to_do}, "
            f"{event.done_before} done before, {event.failed_before} failed before"
        )
        return "\n".join((first, *event.again))
    if isinstance(event, RunStarted):
        return f"[{event.position}/{event.total}] {_name(event)} ..."
    if isinstance(event, RunEnded):
        return f"[{event.position}/{event.total}] {_name(event)}  {_ending(event, last)}"
    if isinstance(event, BlockLost):
        what = "started again" if event.again else "given up, and its cell with it"
        return (
            f"{event.cell}: block {event.block} lost, arm {event.arm} {event.state}"
            f" (attempt {event.attempt}): {what}"
        )
    return _said(event)


def _said(event: Progress) -> str | None:
    if isinstance(event, Stopping):
        return event.hint
    if isinstance(event, SweepStopped):
        return f"stopped: {event.reason}"
    return event.text if isinstance(event, Remark) else None


def _ending(event: RunEnded, last: LiveRun | None) -> str:
    text = f"{event.state} in {event.seconds:.1f} s"
    if event.reason and event.state != "ok":
        return f"{text}: {event.reason}"
    numbers = numbers_text(last) if last is not None else ""
    return f"{text}: {numbers}" if numbers else text


def _name(event: RunStarted | RunEnded) -> str:
    which = [f"repeat {event.repeat}"] if event.repeat or event.arm else []
    which += [f"arm {event.arm}"] if event.arm else []
    return f"{event.cell} ({', '.join(which)})" if which else event.cell


@contextlib.contextmanager
def _live(stream: TextIO) -> Iterator[Subscriber]:
    from rich.console import Console
    from rich.live import Live

    # rich itself leaves colours out where NO_COLOR is set.
    screen = Console(file=stream, highlight=False)
    display = _LiveDisplay(screen)
    with Live(display, console=screen, refresh_per_second=_LOOKS_PER_SECOND, transient=True):
        yield display


class _LiveDisplay:
    """Runs, the current run and its numbers; above them a line for each run that has ended.

    A thread of `rich` draws while events arrive in another, where the handler of a signal may
    publish in the middle of an event: hence a lock that its holder can take again.
    """

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._runs = _LiveRuns()
        self._sweep: SweepStarted | None = None
        self._ended = 0
        self._begun = time.monotonic()
        self._lock = RLock()

    def __call__(self, event: Progress) -> None:
        """Remember the event, and print the line of one that deserves it."""
        last: LiveRun | None = None
        with self._lock:
            if isinstance(event, SweepStarted):
                self._sweep = event
            elif isinstance(event, RunStarted):
                self._runs.begin(event)
            elif isinstance(event, RunEnded):
                self._ended += 1
                last = self._runs.end(event)
        # Printing draws the display too, in this thread, so the lock must be free again.
        line = None if isinstance(event, RunStarted) else plain_line(event, last)
        if line is not None:
            self._screen.print(console.harmless(line), style=_colour(event), markup=False)

    def __rich__(self) -> RenderableType:
        """The lines below those of ended runs."""
        with self._lock:
            return self._below()

    def _below(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        run = self._runs.of()
        if self._sweep is None or run is None:
            return Text("")
        started, now = run.started, run.look()
        run_left, sweep_left = self._runs.left(run, now)
        so_far = f"{duration(time.monotonic() - self._begun)} so far"
        total = started.total if self._sweep.to_run is None else self._sweep.to_run
        bars = self._bars(
            (self._sweep.sweep, "runs", self._ended, total, sweep_left or so_far),
            (_name(started), "step", now.step, started.steps, run_left),
        )
        return Group(bars, Text(f"  {self._news(run, now)}", no_wrap=True, overflow="ellipsis"))

    @staticmethod
    def _news(run: _LiveRun, now: LiveRun) -> str:
        waiting = f"waiting for {now.waits_for}" if now.waits_for else ""
        silent = run.silent_seconds
        if waiting:
            waiting += f" ({duration(run.seconds)})" if not now.step else ""
        elif silent:
            waiting = f"no step for {duration(silent)}"
        return ", ".join(part for part in (waiting, numbers_text(now)) if part)

    @staticmethod
    def _bars(*rows: tuple[str, str, int, int, str]) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for _ in range(3):
            grid.add_column(no_wrap=True)
        for name, noun, done, total, left in rows:
            bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH)
            grid.add_row(Text(printable(name)), f"{noun} {done}/{total}", bar, left)
        return grid


def _colour(event: Progress) -> str | None:
    if isinstance(event, RunEnded):
        return "green" if event.state in FINISHED_GOOD else "red"
    return "yellow" if isinstance(event, BlockLost | Stopping | SweepStopped) else None
