"""Progress of a sweep: live on a terminal, plain lines elsewhere, never in the way of a run."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from bench.cli.live_display import PlainLines, progress_display
from sweeps.progress import RunEnded, RunStarted, StepReached, SweepStarted, SweepStopped

EVENTS = [
    SweepStarted("s", to_run=2, done_before=1, failed_before=0),
    RunStarted("ddp", 0, 1, 2, steps=4, run_id="r1"),
    StepReached("ddp", 2, 4),
    RunEnded("ddp", 0, 1, 2, "r1", "ok", "", 3.21),
    RunStarted("mfsdp", 1, 2, 2, steps=4, run_id="r2"),
    RunEnded("mfsdp", 1, 2, 2, "r2", "nan", "loss at [step 3]", 1.0),
    SweepStopped("1 failed run, as many as --max-failures"),
]

# Publishes all events to a display on stderr, as `run` does.
SHOW = """
import sys, time
from bench.cli.live_display import progress_display
from sweeps.progress import *
with progress_display(sys.stderr) as publish:
    for event in {events!r}:
        publish(event)
        if isinstance(event, StepReached):
            time.sleep(0.4)  # the display draws a few times a second
"""


def test_plain_lines_say_what_starts_and_how_it_ends():
    stream = io.StringIO()
    for event in EVENTS:
        PlainLines(stream)(event)
    assert stream.getvalue().splitlines() == [
        "s: 2 runs to do, 1 done before, 0 failed before",
        "[1/2] ddp ...",
        "[1/2] ddp  ok in 3.2 s",
        "[2/2] mfsdp (repeat 1) ...",
        "[2/2] mfsdp (repeat 1)  nan in 1.0 s: loss at [step 3]",
        "stopped: 1 failed run, as many as --max-failures",
    ]


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    with progress_display(stream) as publish:
        publish(EVENTS[1])
    assert stream.getvalue() == "[1/2] ddp ...\n"


class Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_display_that_breaks_does_not_end_the_sweep():
    with progress_display(Broken()) as publish:
        for event in EVENTS:
            publish(event)


def on_a_terminal(cli, **variables: str) -> str:
    """What the display writes when stderr is a terminal of 100 columns."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW.format(events=EVENTS)],
        env=cli.environment | {"TERM": "xterm-256color", "COLUMNS": "100"} | variables,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the terminal has no writer any more
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert process.wait(timeout=30) == 0
    return shown.decode()


@pytest.mark.timeout(60)
def test_a_terminal_gets_bars_and_lines_in_colour(cli):
    shown = on_a_terminal(cli)
    assert "2/4" in shown  # steps of the current run
    assert "ddp  ok in 3.2 s" in shown
    assert "\x1b[32m" in shown  # green


@pytest.mark.timeout(60)
def test_no_color_is_honoured_on_a_terminal(cli):
    shown = on_a_terminal(cli, NO_COLOR="1")
    assert "ddp  ok in 3.2 s" in shown
    assert "\x1b[3" not in shown.replace("\x1b[3m", "")


@pytest.mark.timeout(60)
def test_a_reason_that_looks_like_markup_is_printed_as_it_is(cli):
    assert "nan in 1.0 s: loss at [step 3]" in on_a_terminal(cli)
