"""Ranks as forks of their agent: what torchrun asks of a process, and what a rank must not keep."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from bench.launch.forked_ranks import ForkedRank, name_callers_cheaply
from bench.launch.local.process_tree import rank_of
from bench.launch.process import AGENT_PID_VARIABLE

pytestmark = pytest.mark.processes


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start rank 3 of a run whose worker is this code; what is still there is ended."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("ONLY_OF_THE_AGENT", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[ForkedRank] = []

    def start(code: str) -> ForkedRank:
        (tmp_path / "forked_worker.py").write_text(code)
        env = {"RANK": "3", AGENT_PID_VARIABLE: str(os.getpid())}
        rank = ForkedRank(["forked_worker", str(tmp_path)], env)
        started.append(rank)
        return rank

    yield start
    for rank in started:
        if rank.poll() is None:
            os.kill(rank.pid, signal.SIGKILL)
            rank.wait(10)


def test_a_rank_has_its_own_environment_session_name_and_log(forked, tmp_path: Path) -> None:
    rank = forked(
        "import os, sys\n"
        "own = os.getsid(0) == os.getpid(), open('/proc/self/comm').read()\n"
        "os.write(1, repr([sorted(os.environ), sys.argv[1:], *own]).encode())\n"
        "os._exit(7)\n"
    )
    assert rank.wait(200) == 7
    assert rank.poll() == 7
    said = ast.literal_eval((tmp_path / "logs" / "rank3.log").read_text())
    assert said == [[AGENT_PID_VARIABLE, "RANK"], [str(tmp_path)], True, "rank3\n"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass\n", 0),
        ("raise SystemExit(5)\n", 5),
        ("raise SystemExit('words')\n", 1),
        ("raise ValueError('wrong')\n", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n", -signal.SIGTERM),
    ],
)
def test_exit_codes_are_those_of_a_process_of_its_own(forked, code: str, expected: int) -> None:
    assert forked(code).wait(200) == expected


def test_a_rank_that_runs_is_waited_for_found_by_its_name_and_ended(forked) -> None:
    rank = forked("import time; time.sleep(600)\n")
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.1)
    deadline = time.monotonic() + 200
    while rank_of(psutil.Process(rank.pid)) != 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rank_of(psutil.Process(rank.pid)) == 3
    # torchrun ends ranks by a signal to the session that each has from its first moment on.
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.wait(200) == -signal.SIGTERM


def test_torchrun_names_its_callers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous

    def recorded() -> str:
        return rendezvous.get_method_name()

    def next_rendezvous() -> str:
        return recorded()

    own = rendezvous.get_method_name
    monkeypatch.setattr(rendezvous, "get_method_name", own)  # as it was, behind the test
    assert next_rendezvous() == "next_rendezvous"
    name_callers_cheaply()
    assert rendezvous.get_method_name is not own
    assert next_rendezvous() == "next_rendezvous"
