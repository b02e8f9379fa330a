"""Who owns a results folder or a run, also after the owner was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import RUN

from bench.errors import UsageError
from bench.store import ResultsStore

ROOT = Path(__file__).resolve().parents[2]

OWNER = """
import sys
from bench.spec import ResolvedRun
from bench.store import ResultsStore
store = ResultsStore.open(sys.argv[1], create=True)
run = ResolvedRun.model_validate_json(sys.argv[2])
with store.lock():
    folder = store.new_run(run, sweep="s", cell="c", repeat=0, arm=None, code="x")
    print(folder.run_id, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(store: ResultsStore):
    """Another process that holds the folder's lock and owns a run; `owner.run_id` names it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(store.root), RUN.model_dump_json()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.run_id = process.stdout.readline().strip()
    yield process
    process.kill()
    process.communicate()


def test_what_a_living_owner_holds_is_free_once_it_was_killed_by_sigkill(
    store: ResultsStore, owner: subprocess.Popen
) -> None:
    refused = pytest.raises(UsageError, match=f"another runner.*pid {owner.pid} on ")
    with refused, store.lock():
        pass
    for _ in range(50):  # looking at a run does not disturb its owner
        assert store.read(owner.run_id).status.state == "running"
    owner.kill()
    owner.wait()
    with store.lock():
        pass
    status = store.read(owner.run_id).status
    assert status.state == "interrupted"
    assert "without writing how" in status.reason
    assert status.cell == "c"


def test_a_second_runner_in_the_same_process_is_refused_too(store: ResultsStore) -> None:
    with store.lock(), pytest.raises(UsageError, match=f"pid {os.getpid()}"), store.lock():
        pass


def test_a_file_system_without_locks_is_refused_with_a_remedy(
    store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UsageError, match="No locks available; the file system"), store.lock():
        pass


def test_a_process_started_by_the_owner_does_not_keep_the_run_alive(store: ResultsStore) -> None:
    folder = store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x")
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        folder.close()
        assert store.read(folder.run_id).status.state == "interrupted"
    finally:
        child.kill()
        child.wait()
