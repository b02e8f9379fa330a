"""Historical bugs put back, one at a time, to see whether the checker notices.

The ranks import a changed copy of mfsdp_core; neither they nor the judge are told that it was
changed, let alone how. Every bug meets the same cases in the same order, up to the first failure.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.errors import UsageError
from bench.validate.bugs import BUG_BY_ID, BUGS, Bug
from bench.validate.cases import Case
from bench.validate.mutation import copy_of_core
from bench.validate.ranks import Nursery
from bench.validate.session import Place, until_first_failure, verdicts
from bench.verdict import BugVerdict, CaseVerdict

ALL = "all"


def parse_bugs(text: str) -> tuple[Bug, ...]:
    """`R1,R2` or `all`, as bugs in the order of the table.

    Raises:
        UsageError: a number that is not in the table.
    """
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if [word.lower() for word in wanted] == [ALL]:
        return BUGS
    unknown = [word for word in wanted if word.upper() not in BUG_BY_ID]
    if unknown or not wanted:
        known = ", ".join(BUG_BY_ID)
        found = ", ".join(unknown) or "nothing"
        raise UsageError(f"--inject: expected {ALL}, or some of {known}; found {found}")
    names = {word.upper() for word in wanted}
    return tuple(bug for bug in BUGS if bug.id in names)


def inject(
    nursery: Nursery,
    bugs: Iterable[Bug],
    cases: Sequence[Case],
    place: Place,
    stop: threading.Event,
) -> Iterator[tuple[BugVerdict, list[CaseVerdict]]]:
    """Each bug's verdict, with those of the cases that it met; ends early after `stop`.

    Raises:
        StaleChangeError: the table of bugs has to follow the source.
    """
    for bug in bugs:
        if stop.is_set():
            return
        if bug.without_changes:
            verdict = BugVerdict(
                bug=bug.id, title=bug.title, outcome="not_applicable", reason=bug.without_changes
            )
            yield verdict, []
            continue
        start = time.perf_counter()
        met = _met(nursery, bug, cases, place, stop)
        if stop.is_set() and not any(case.state == "failed" for case in met):
            return
        yield _verdict(bug, met, time.perf_counter() - start), met


def _met(
    nursery: Nursery, bug: Bug, cases: Sequence[Case], place: Place, stop: threading.Event
) -> list[CaseVerdict]:
    # A neutral name: nothing that runs may tell a changed copy from the original.
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy_of_core(Path(folder), bug.changes)
        found = verdicts(nursery, cases, place, core=Path(folder), stop=stop)
        return list(until_first_failure(found))


def _verdict(bug: Bug, met: Sequence[CaseVerdict], seconds: float) -> BugVerdict:
    run = [case for case in met if case.state != "not_applicable"]
    failed = next((case for case in met if case.state == "failed"), None)
    common = {"bug": bug.id, "title": bug.title, "cases_run": len(run), "seconds": seconds}
    if failed is not None:
        return BugVerdict.model_validate(
            {**common, "outcome": "caught", "case": failed.case, "failure": failed.failures[0]}
        )
    if not run:
        reason = "no case could run here"
        return BugVerdict.model_validate({**common, "outcome": "not_applicable", "reason": reason})
    return BugVerdict.model_validate({**common, "outcome": "missed"})
