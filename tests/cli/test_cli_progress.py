"""Progress of a sweep, never in the way of a run; signals while it runs, beyond one Ctrl-C."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path, PosixPath

import pytest

from bench.cli.interrupts import stop_on_signals
from bench.cli.live_display import LiveRun, plain, progress_display, read_live_run
from bench.record import StepSample
from reports.renderers.quantity import duration
from sweeps.progress import Remark, RunEnded, RunStarted, StepReached, SweepStarted
from sweeps.resume import PastRun

NOWHERE = PosixPath("/nowhere")
EVENTS = [
    SweepStarted("s", to_run=2, done_before=1, failed_before=0),
    RunStarted("ddp", 0, 1, 2, 4, "r1", NOWHERE, ranks=1),
    StepReached("r1", 2),
    RunEnded(PastRun("ddp", 0, "r1", "ok", ""), 1, 2, 3.21),
    RunStarted("mfsdp", 1, 2, 2, 4, "r2", NOWHERE, ranks=1),
    RunEnded(PastRun("mfsdp", 1, "r2", "nan", "loss at [step 3]"), 2, 2, 1.0),
    Remark("stopped: 1 failed run, as many as --max-failures", is_warning=True),
]

# Publishes all events to a display on stderr, as `run` does.
SHOW = """
import sys, time
from pathlib import PosixPath
from bench.cli.live_display import progress_display
from sweeps.progress import *
from sweeps.resume import PastRun
with progress_display(sys.stderr) as publish:
    for event in {events!r}:
        publish(event)
        if isinstance(event, StepReached):
            time.sleep(0.7)  # the display draws twice a second
"""


def test_plain_lines_say_what_starts_and_how_it_ends():
    stream = io.StringIO()
    show = plain(stream)
    for event in EVENTS:
        show(event)
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


def on_a_terminal(cli, events=EVENTS, **variables: str) -> str:
    """What the display writes when stderr is a terminal of 100 columns."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW.format(events=events)],
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
    assert process.wait(timeout=200) == 0
    return shown.decode()


def test_a_terminal_gets_bars_lines_in_colour_and_the_numbers_of_the_current_run(cli, tmp_path):
    write_steps(tmp_path, 0, 100.0, 100.0)
    started = dataclasses.replace(EVENTS[1], folder=PosixPath(tmp_path))
    shown = on_a_terminal(cli, [EVENTS[0], EVENTS[1], started, *EVENTS[2:]])
    assert "runs 0/2" in shown
    assert "step 0/4" in shown
    assert "step 2/4" in shown
    assert "waiting for the ranks to start and to load torch" in shown
    assert "  100 ms per step, 640.0 tokens/s, loss 2.0000, memory 1.0 MiB" in shown
    assert "[1/2] ddp  ok in 3.2 s: 100 ms per step, 640.0 tokens/s" in shown
    assert "nan in 1.0 s: loss at [step 3]" in shown, "a reason is no markup"
    assert "\x1b[32m" in shown  # green
    hidden, again = "\x1b[?25l", "\x1b[?25h"
    assert shown.rfind(again) > shown.find(hidden) > -1, "the cursor is still hidden"


def test_no_color_is_honoured_on_a_terminal(cli):
    shown = on_a_terminal(cli, NO_COLOR="1")
    assert "ddp  ok in 3.2 s" in shown
    assert "\x1b[3" not in shown.replace("\x1b[3m", "")


def write_steps(folder: Path, rank: int, *milliseconds: float, cut: str = "", **fields) -> None:
    """One sample per time; `cut` is the beginning of a line that is still being written."""
    lines = []
    for step, one in enumerate(milliseconds, start=1):
        sample = StepSample(step, one, 2.0 + rank, 1.0, 1e-3, 64, 0, (rank + 1) << 20)
        lines.append(json.dumps({"rank": rank} | dataclasses.asdict(sample) | fields) + "\n")
    (folder / f"steps.node{rank}.jsonl").write_text("".join(lines) + cut)


def test_a_running_run_is_read_from_the_ends_of_its_files(tmp_path):
    write_steps(tmp_path, 0, 10.0, 20.0, 99.0, cut='{"step": 4, "millis')
    write_steps(tmp_path, 1, 30.0, 20.0)
    live = read_live_run(tmp_path, ranks=2, steps=9)
    # Two steps are common. The slower rank decides: 30 and 20. Loss is the mean of 2 and 3.
    assert live == LiveRun(2, 25.0, 128 / 0.025, 2.5, 2 << 20, False, "")


def test_a_long_run_is_not_read_from_its_start(tmp_path):
    write_steps(tmp_path, 0, *[1000.0] * 5000, *[10.0] * 20)
    live = read_live_run(tmp_path, ranks=1, steps=9000)
    assert (live.step, live.milliseconds) == (5020, 10.0)


def test_device_memory_outranks_the_process_and_the_last_step_waits_for_records(tmp_path):
    write_steps(tmp_path, 0, 10.0, device_peak_bytes=7 << 30, a_later_field=1)
    live = read_live_run(tmp_path, ranks=1, steps=1)
    assert (live.memory_bytes, live.on_device) == (7 << 30, True)
    assert live.waits_for == "the ranks to write their records"


def test_a_starting_run_says_what_it_waits_for(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()

    def waits_for() -> str:
        return read_live_run(tmp_path, ranks=3, steps=9).waits_for

    assert waits_for() == "the ranks to start and to load torch"
    proofs = (logs / "code_proof.node0.jsonl").open("a", buffering=1)
    proofs.write('{"rank": 1, "arm": null}\n')
    assert waits_for() == "rank 0 and 1 more to load torch"
    proofs.write('{"rank": 0, "arm": null}\n')
    assert waits_for() == "rank 2 to load torch"
    proofs.write('{"rank": 2, "arm": null}\n')
    proofs.close()
    assert waits_for() == "the ranks to find each other and to build the model"
    (tmp_path / "runtime.json").touch()
    assert waits_for() == "the first step"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_are_written_for_people(seconds, text):
    assert duration(seconds) == text


def test_a_log_gets_a_line_with_the_numbers_of_a_run_now_and_then(tmp_path, monkeypatch):
    write_steps(tmp_path, 0, 100.0, 100.0)
    stream = io.StringIO()
    show = plain(stream)
    show(RunStarted("ddp", 0, 1, 1, 4, "r1", tmp_path, ranks=1))
    show(RunStarted("mfsdp", 0, 2, 2, 9, "r2", NOWHERE, ranks=1))
    show(StepReached("r1", 1))
    monkeypatch.setattr("bench.cli.live_display._PLAIN_LINE_EVERY_SECONDS", 0.0)
    show(StepReached("r1", 2))
    assert stream.getvalue().splitlines() == [
        "[1/1] ddp ...",
        "[2/2] mfsdp ...",
        "[1/1] ddp  step 2 of 4, 100 ms per step, 640.0 tokens/s, loss 2.0000, memory 1.0 MiB",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_the_run_to_stop(number):
    stop = threading.Event()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(200)


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = threading.Event()
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wait(0.1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(threading.Event()):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
