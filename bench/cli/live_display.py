"""Progress of a sweep: a live display on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from bench.record import FINISHED_GOOD
from sweeps.progress import (
    BlockLost,
    Progress,
    RunEnded,
    RunStarted,
    StepReached,
    Stopping,
    Subscriber,
    SweepStarted,
    SweepStopped,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars


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


class PlainLines:
    """One line when a run ends; steps are not shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Progress) -> None:
        """Print the event if it deserves a line."""
        line = plain_line(event)
        if line is not None:
            print(line, file=self._stream, flush=True)


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def plain_line(event: Progress) -> str | None:
    """The text of an event, None for one that has none."""
    if isinstance(event, SweepStarted):
        first = (
            f"{event.sweep}: {_runs(event.to_run)} to do, {event.done_before} done before,"
            f" {event.failed_before} failed before"
        )
        return "\n".join((first, *event.again))
    if isinstance(event, RunStarted):
        return f"[{event.position}/{event.total}] {_name(event)} ..."
    if isinstance(event, RunEnded):
        reason = f": {event.reason}" if event.reason and event.state != "ok" else ""
        return (
            f"[{event.position}/{event.total}] {_name(event)}"
            f"  {event.state} in {event.seconds:.1f} s{reason}"
        )
    if isinstance(event, BlockLost):
        what = "started again" if event.again else "given up, and its cell with it"
        return (
            f"{event.cell}: block {event.block} lost, arm {event.arm} {event.state}"
            f" (attempt {event.attempt}): {what}"
        )
    if isinstance(event, Stopping | SweepStopped):
        return event.hint if isinstance(event, Stopping) else f"stopped: {event.reason}"
    return None


def _name(event: RunStarted | RunEnded) -> str:
    which = [f"repeat {event.repeat}"] if event.repeat or event.arm else []
    which += [f"arm {event.arm}"] if event.arm else []
    return f"{event.cell} ({', '.join(which)})" if which else event.cell


@contextlib.contextmanager
def _live(stream: TextIO) -> Iterator[Subscriber]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    # rich itself leaves colours out where NO_COLOR is set.
    console = Console(file=stream, highlight=False)
    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bars:
        yield _LiveDisplay(bars, console)


class _LiveDisplay:
    """Two bars, runs and steps of the current run, and a line above them for each ended run."""

    def __init__(self, bars: Bars, console: Console) -> None:
        self._bars = bars
        self._console = console
        self._runs: Any = None
        self._steps: Any = None

    def __call__(self, event: Progress) -> None:
        """Update the bars."""
        if isinstance(event, SweepStarted):
            self._line(plain_line(event) or "", None)
            self._runs = self._bars.add_task("runs", total=event.to_run)
        elif isinstance(event, RunStarted):
            name = _name(event)
            self._steps = self._bars.add_task(f"{name} (starting)", total=event.steps)
        elif isinstance(event, StepReached):
            self._bars.update(self._steps, description=event.cell, completed=event.step)
        elif isinstance(event, RunEnded):
            self._bars.remove_task(self._steps)
            self._bars.advance(self._runs)
            colour = "green" if event.state in FINISHED_GOOD else "red"
            self._line(plain_line(event) or "", colour)
        elif isinstance(event, BlockLost | Stopping | SweepStopped):
            self._line(plain_line(event) or "", "yellow")

    def _line(self, text: str, style: str | None) -> None:
        self._console.print(text, style=style, markup=False)
