"""What an agent on another machine does when its launcher ends the run, or is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launch.remote_end import RunFiles

AGENT = """
import sys
from pathlib import Path
from bench.launch import remote_end
remote_end._LOOK_SECONDS = 0.02
remote_end._GONE_SECONDS = float(sys.argv[2])
print("there", flush=True)
remote_end.RunFiles(Path(sys.argv[1])).watch(lambda: print("stacks", flush=True))
"""
FOR_EVER = "1e9"


def agent(run: Path, gone_seconds: str) -> subprocess.Popen[str]:
    (run / "logs").mkdir()
    RunFiles(run).live()
    found = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(run), gone_seconds], stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "there\n"
    return found


def test_it_ends_when_the_run_folder_says_so_and_answers_until_then(tmp_path: Path) -> None:
    with agent(tmp_path, FOR_EVER) as found:
        files = RunFiles(tmp_path)
        files.ask_for_stacks()
        assert found.stdout is not None
        assert found.stdout.readline() == "stacks\n"
        assert found.poll() is None
        files.end(0.0)
        assert found.wait(200) == -signal.SIGTERM
    files.remove()
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_it_ends_when_the_launcher_gives_no_sign_of_life(tmp_path: Path, is_there: bool) -> None:
    with agent(tmp_path, "0.1") as found:
        if not is_there:
            (tmp_path / "logs" / "launcher.life").unlink()
        assert found.wait(200) == -signal.SIGTERM
