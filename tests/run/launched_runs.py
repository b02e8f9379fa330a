"""One run by the real launcher, for tests that look at its record."""

from __future__ import annotations

import threading
from pathlib import Path

from bench.launch.code import RankCode, code_identity
from bench.launch.run import launch
from bench.launch.watch import Limits
from bench.record import RunRecord
from bench.spec import ResolvedRun
from bench.store import ResultsStore

LIMITS = Limits(tick_seconds=0.1, grace_seconds=1.0)


def launched(root: Path, resolved: ResolvedRun, code: RankCode | None = None) -> RunRecord:
    """The record of a run in `root / "results"`, whatever becomes of it. code: of an arm."""
    store = ResultsStore.open(root / "results", create=True)
    folder = store.new_run(
        resolved,
        sweep="s",
        cell="c",
        repeat=0,
        arm=None if code is None else code.arm,
        code=code_identity(resolved, code=code),
    )
    launch(resolved, folder, stop=threading.Event(), limits=LIMITS, code=code)
    return store.read(folder.run_id)
