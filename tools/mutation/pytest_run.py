"""A run of pytest in a forked process: tests of the core on the mfsdp_core of a folder.

The process has loaded torch before, and so has the server that forks the ranks of its tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from bench.launch.process import die_with_parent
from bench.testing import workers
from bench.testing.call import FunctionCall
from bench.testing.fork_server import serve_requests
from bench.testing.load_clock import stretched
from bench.validate.patched_core import CORE
from tools.mutation.line_coverage import Lines, joined, noted, notes, start_notes

ROOT = CORE.parent
_ForkServer = workers.ForkServer
#: Of one test on a machine with nothing else to do.
_TEST_SECONDS = 60.0


@dataclass
class Ran:
    """What came of a run. failed: the first test that did, and how. lines: of tests that passed."""

    failed: tuple[str, str] | None = None
    lines: dict[str, Lines] = field(default_factory=dict)


def run_pytest(core: str, arguments: Sequence[str], trace: bool) -> Ran:
    """On a rank of its own: run the tests that `arguments` name with the core below `core`.

    trace: it notes its lines (`noting_core`), and all tests run. Else the run ends at a failure.
    """
    import pytest

    # Tests start groups of their own.
    dist.destroy_process_group()
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": os.pathsep.join((core, str(ROOT))), "PYTHONSAFEPATH": "1"}
    # Before pytest starts threads. It ends with this process.
    told = _Told(ForkedServer().__enter__(), trace)
    # Without the root, which holds another mfsdp_core.
    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=tests/core"]
    options += [f"--timeout={stretched(_TEST_SECONDS):.0f}", *([] if trace else ["-x"])]
    pytest.main([*options, *arguments], plugins=[told])
    return told.ran


class ForkedServer(workers.ForkServer):
    """Forked from this process, with all that it has loaded: it starts at once.

    Its ranks have the mfsdp_core of this process, if that has loaded one.
    """

    def started(self, ours: Connection, theirs: Connection) -> _Child:
        """A child that has all that this process has."""
        parent = os.getpid()
        child = _Child(os.fork())
        if not child.pid:
            try:
                die_with_parent(parent)
                ours.close()
                serve_requests(theirs)
            finally:
                os._exit(0)
        return child


@dataclass(frozen=True)
class _Child:
    """A process id, as `subprocess` would have it."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class _Told:
    """A plugin of pytest: gives the first pool of ranks a server, and notes how tests end."""

    def __init__(self, server: workers.ForkServer, trace: bool) -> None:
        self.ran = Ran()
        self._server: workers.ForkServer | None = server
        self._trace = trace
        self._of_ranks: list[Lines] = []

    def pytest_configure(self) -> None:
        """Before any test is collected."""
        module: Any = workers
        module.ForkServer = self._given
        if self._trace:
            self._trace_ranks()

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported any more."""
        if report.failed:
            self._failed(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A part of a test is over."""
        if report.failed:
            self._failed(report)
        elif self._trace and report.when == "call" and report.passed:
            self.ran.lines[report.nodeid] = {}

    def pytest_runtest_logstart(self) -> None:
        """A test begins, its fixtures included."""
        self._of_ranks.clear()
        start_notes()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It is over."""
        if nodeid in self.ran.lines:
            self.ran.lines[nodeid] = joined([notes(), *self._of_ranks])

    def _failed(self, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash else str(report.longrepr)
        self.ran.failed = self.ran.failed or (report.nodeid, " ".join(said.split())[:160])

    def _given(
        self, paths: tuple[str, ...] = (), modules: tuple[str, ...] = ()
    ) -> AbstractContextManager[workers.ForkServer]:
        """For the first pool the server that was forked at once."""
        server, self._server = self._server, None
        if server is None:
            return _ForkServer(paths=paths, modules=modules)
        server.paths = paths
        return nullcontext(server)

    def _trace_ranks(self) -> None:
        patched: Any = workers.Workers
        plain = patched._run

        def run(own: Any, call: FunctionCall, *limits: Any) -> list[Any]:
            found = plain(own, FunctionCall.of(noted, (call,)), *limits)
            self._of_ranks += [lines for _, lines in found]
            return [value for value, _ in found]

        patched._run = run
