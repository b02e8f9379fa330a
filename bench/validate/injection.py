"""Injects bugs, one at a time, to see whether the checker notices.

The ranks import a changed copy of mfsdp_core; neither they nor the judge are told that it was
changed, let alone how. Every bug meets the same cases in the same order, up to the first that fails
on the changed copy and passes on the core as it is.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.testing.workers import ForkServer, WorkersError
from bench.validate.bugs import BUG_BY_ID, BUGS, UNLISTED, Bug, bug_of
from bench.validate.matrix import AnyCase
from bench.validate.patched_core import StalePatchError, copy_of_core
from bench.validate.rank import load_core
from bench.validate.session import LOAD_SECONDS, WorkerSettings, verdicts
from bench.validate.traces import exception_of
from bench.verdict import BugVerdict, CaseVerdict

ALL = "all"
_SUFFIXES = (".patch", ".diff")
_EXPECTED = f"expected {ALL}, unlisted, some of {', '.join(BUG_BY_ID)}, or FILE.patch"


def parse_bugs(text: str) -> tuple[Bug, ...]:
    """`R1,R2`, `all` (the historical ones), `unlisted`, or patch files, as bugs.

    Raises:
        UsageError: neither a known number nor a patch file that fits the source.
    """
    found: list[Bug] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        found += _named(word)
    if not found:
        raise UsageError(f"--inject: {_EXPECTED}; found nothing")
    return tuple(dict.fromkeys(found))


def _named(word: str) -> Sequence[Bug]:
    groups = {ALL: BUGS, "unlisted": UNLISTED}
    if word.lower() in groups:
        return groups[word.lower()]
    if word.upper() in BUG_BY_ID:
        return (BUG_BY_ID[word.upper()],)
    if word.endswith(_SUFFIXES):
        bug = bug_of(Path(word))
        with tempfile.TemporaryDirectory() as folder:
            copy_of_core(Path(folder), bug.patch)
        return (bug,)
    raise UsageError(f"--inject: {_EXPECTED}; found {word}")


class Control:
    """The same cases on the core as it is: a failure there as well says nothing of the bug."""

    def __init__(self, fork_server: ForkServer, workers: WorkerSettings) -> None:
        self._fork_server = fork_server
        self.workers = workers
        self._passed: dict[str, bool] = {}

    @property
    def failing(self) -> list[str]:
        """Cases that were seen to fail without any change."""
        return [name for name, passed in self._passed.items() if not passed]

    def passes(self, case: AnyCase) -> bool:
        """Whether `case` passes without any change; asked once."""
        if case.id not in self._passed:
            (verdict,) = verdicts(self._fork_server, [case], self.workers)
            self._passed[case.id] = verdict.state == "passed"
        return self._passed[case.id]


def inject(
    fork_server: ForkServer,
    bugs: Iterable[Bug],
    cases: Sequence[AnyCase],
    workers: WorkerSettings,
    stop: threading.Event,
) -> Iterator[BugVerdict]:
    """Each bug's verdict, in order; ends early after `stop`."""
    control = Control(fork_server, workers)
    for bug in bugs:
        if stop.is_set():
            return
        start = time.perf_counter()
        # A neutral name: nothing that runs may tell a changed copy from the original.
        with tempfile.TemporaryDirectory(prefix="core-") as name:
            folder = Path(name)
            reason = _why_broken(fork_server, bug.patch, folder)
            found = [] if reason else met(fork_server, folder, cases, control, stop)
        if stop.is_set() and not (found and found[-1].state == "failed"):
            return
        verdict = {"bug": bug.id, "title": bug.title, "seconds": time.perf_counter() - start}
        verdict |= {"outcome": "broken", "reason": reason} if reason else _outcome(found, control)
        yield BugVerdict.model_validate(verdict)


def _why_broken(fork_server: ForkServer, patch: Path, folder: Path) -> str | None:
    """Why there is no changed core to ask: the patch does not fit, or its result does not import.

    Every file is compiled, also what no import of the package reaches.
    """
    try:
        core = copy_of_core(folder, patch)
        for file in sorted(core.rglob("*.py")):
            compile(file.read_text(encoding="utf-8"), str(file.relative_to(folder)), "exec")
        with fork_server.workers(1, folder) as workers:
            workers.run(load_core, seconds=LOAD_SECONDS)
    except StalePatchError as error:
        return str(error).splitlines()[0]
    except SyntaxError as error:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    except WorkersError as error:
        return f"the changed core cannot be imported: {exception_of(error.failures[0].text)}"
    return None


def met(
    fork_server: ForkServer,
    core: Path,
    cases: Sequence[AnyCase],
    control: Control,
    stop: threading.Event,
) -> list[CaseVerdict]:
    """Verdicts on the core in a folder, up to the first failure that the change makes.

    A case that fails without the change as well is left out.
    """
    by_id = {case.id: case for case in cases}
    found: list[CaseVerdict] = []
    for verdict in verdicts(fork_server, cases, control.workers, core=core, stop=stop):
        if verdict.state == "failed" and not control.passes(by_id[verdict.case]):
            continue
        found.append(verdict)
        if verdict.state == "failed":
            break
    return found


def _outcome(found: Sequence[CaseVerdict], control: Control) -> dict[str, Any]:
    """Of cases that a bug has met: caught, missed, or nothing was asked."""
    run = [case for case in found if case.state != "not_applicable"]
    outcome: dict[str, Any] = {"cases_run": len(run), "outcome": "missed"}
    if run and run[-1].state == "failed":
        outcome |= {"outcome": "caught", "case": run[-1].case, "failure": run[-1].failures[0]}
    elif not run:
        reason = "no case could run here"
        if control.failing:
            reason = f"fail without it as well: {', '.join(control.failing)}. Look at those first"
        outcome |= {"outcome": "not_applicable", "reason": reason}
    return outcome
