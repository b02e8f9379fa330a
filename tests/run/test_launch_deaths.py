"""The order in which children of a process die, told afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bench.launch.agent import Deaths

pytestmark = pytest.mark.processes

# A process of its own: pytest has other children.
PROGRAM = """
import contextlib, os, subprocess, sys, time
from bench.launch.agent import Deaths

def watched():
    links = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links += "pidfd" in os.readlink("/proc/self/fd/" + name)
    return links

deaths = Deaths(2)
children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
while watched() < 2:
    time.sleep(0.01)
for child in reversed(children):
    os.kill(child.pid, 15)
    # It is dead, which a signal that was sent does not say, and waits to be reaped.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    time.sleep({pause})
codes = [child.wait() for child in children]
died = deaths.of_all()
first, second = (died[child.pid] for child in children)
print(f"{{first - second:.6f}} s apart, {{time.time() - first:.3f}} s ago")
sys.exit(0 if second <= first and abs(time.time() - first) < 600 else 1)
"""


@pytest.mark.parametrize("pause", [0.05, 0], ids=["apart", "at once"])
def test_the_order_is_known_also_when_the_children_are_reaped_at_once(pause: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(pause=pause)],
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done


def test_a_kernel_that_cannot_tell_leaves_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child = subprocess.Popen(["sleep", "60"])
    deaths = Deaths(1)
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert deaths.of_all() == {}
