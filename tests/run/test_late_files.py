"""A network file system shows late what other machines wrote: no run is called broken for it.

The layer: what another node writes goes to a hidden folder, and reaches the run folder only when
its time has come, as a client with cached listings sees it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from small_runs import RUN

from bench.launch.protocol import JobState, Symptoms
from bench.launch.run import launch
from bench.launch.watch import Limits
from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.store import ResultsStore
from bench.store.samples import node_file

LATE = 0.6


class LateFolder:
    """Files that another machine has written, each seen in `folder` after `LATE` seconds."""

    def __init__(self, folder: Path, hidden: Path) -> None:
        self.hidden = hidden
        self._folder = folder
        self._timers: list[threading.Timer] = []

    def show(self, *names: str, after: float = LATE) -> None:
        for name in names:
            timer = threading.Timer(after, os.replace, (self.hidden / name, self._folder / name))
            timer.start()
            self._timers.append(timer)

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


class OtherNodes:
    """A launcher whose job has ended at once, with files that are seen later."""

    id = "1"

    def __init__(self, hidden: Path, exit_code: int = 0) -> None:
        self._hidden = hidden
        self._exit_code = exit_code

    def start(self, order):
        self.late = LateFolder(order.run_dir, self._hidden)
        if self._exit_code:
            document = {"kind": "out_of_memory", "message": "no room", "time_seconds": 1.0}
            (self._hidden / "failure.rank1.json").write_text(json.dumps(document))
            self.late.show("failure.rank1.json")
            return self
        for rank in range(RUN.launch.ranks):
            with SampleSink(self._hidden / node_file(rank), rank) as sink:
                for step in range(1, RUN.train.steps + 1):
                    sink.append(StepSample(step, 1.0, 1.0, 1.0, 0.1, 8, 0, 1))
        (self._hidden / "memory.json").write_text("{}")
        (order.run_dir / "runtime.json").write_text("{}")
        (self._hidden / "runtime.json").write_text('{"meters": {}}')
        self.late.show(node_file(0), after=0.0)
        self.late.show(node_file(1), "memory.json")
        self.late.show("runtime.json", after=LATE + 0.2)
        return self

    def wait(self, _seconds: float) -> JobState:
        return JobState("ended", exit_code=self._exit_code)

    def cancel(self, grace_seconds: float) -> None:
        pass

    def symptoms(self) -> Symptoms:
        return Symptoms()

    def ask_for_stacks(self) -> None:
        pass


def launched(store: ResultsStore, launcher: OtherNodes):
    folder = store.new_run(RUN, sweep="s", cell="c", repeat=0, arm=None, code="x")
    status = launch(
        RUN, folder, stop=threading.Event(), limits=Limits(tick_seconds=0.01), launcher=launcher
    )
    launcher.late.join()
    return status, store.read(folder.run_id)


def hidden(tmp_path: Path) -> Path:
    path = tmp_path / "hidden"
    path.mkdir()
    return path


def test_a_run_whose_samples_come_late_is_whole(store: ResultsStore, tmp_path: Path) -> None:
    status, record = launched(store, OtherNodes(hidden(tmp_path)))
    assert status.state in {"ok", "unstable"}, status.reason
    assert record.is_whole, record.damage
    assert "meters" in record.environment["runtime"]


def test_why_a_run_failed_is_known_though_it_comes_late(
    store: ResultsStore, tmp_path: Path
) -> None:
    status, _ = launched(store, OtherNodes(hidden(tmp_path), exit_code=1))
    assert (status.state, status.failed_rank) == ("out_of_memory", 1)


@pytest.mark.parametrize(("age_seconds", "state"), [(10, "running"), (900, "interrupted")])
def test_a_run_of_another_machine_lives_while_its_files_change(
    store: ResultsStore, age_seconds: float, state: str
) -> None:
    folder = store.new_run(RUN, sweep="s", cell="c", repeat=0, arm=None, code="x")
    folder.close()
    (folder.path / "owner.lock").write_text("pid 7 on another-machine")
    changed = time.time() - age_seconds
    for path in [*folder.path.iterdir(), folder.path]:
        os.utime(path, (changed, changed))
    assert store.read(folder.run_id).status.state == state
