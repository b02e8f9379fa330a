"""Ctrl-C on a real terminal: what a person sees, and what the record says afterwards."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from bench.store import ResultsStore

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
ENDLESS = "matrix: {product: {train.steps: [100000], train.seed: [1, 2]}}\n"


class Terminal:
    """A runner with a terminal of its own as stderr."""

    def __init__(self, cli, path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            cli.command("run", path),
            cwd=cli.folder,
            env=cli.environment | {"TERM": "xterm-256color", "COLUMNS": "200"},
            stdout=subprocess.DEVNULL,
            stderr=slave,
        )
        os.close(slave)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:  # the terminal has no writer any more
                return
            self.shown += chunk.decode(errors="replace")

    def ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(10)
        os.close(self.master)
        return code


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("times", [pytest.param(1, id="once"), pytest.param(2, id="twice")])
def test_ctrl_c_on_a_terminal(cli, fast, times: int) -> None:
    terminal = Terminal(cli, cli.sweep(fast + ENDLESS))
    wait_until(lambda: any(cli.folder.rglob("steps.node0.jsonl")), "a step")
    wait_until(lambda: HIDE in terminal.shown, "the live display")
    for _ in range(times):
        terminal.ctrl_c()
        wait_until(lambda: "once more to end at once" in terminal.shown, "the hint")
    assert terminal.finish() == 130
    assert terminal.shown.rfind(SHOW) > terminal.shown.rfind(HIDE), "the cursor is still hidden"
    assert "0 failed, 1 interrupted, 1 not started" in terminal.shown, terminal.shown[-600:]
    assert "the same command goes on from here" in terminal.shown
    assert cli.ranks_alive() == []
    (record,) = ResultsStore.open(cli.folder / "results", create=False).records()
    assert record.status.state == "interrupted"
    assert record.status.reason.startswith("interrupted by the user (Ctrl-C) (")
