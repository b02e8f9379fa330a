"""The validator notices bugs that are put back into the core, on the list or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from validate_mutants import UNLISTED

from bench.testing.workers import ForkServer
from bench.validate.bugs import BUGS, Bug, Change
from bench.validate.injection import first_failure, parse_bugs
from bench.validate.matrix import cases
from bench.validate.mutation import copy_of_core
from bench.validate.session import MODULES, WorkerSettings

pytestmark = pytest.mark.processes

QUICK = cases("mfsdp", full=False)
SAMPLE = ("R2", "R8")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(modules=MODULES) as made:
        yield made


def test_a_bug_is_asked_for_by_its_number() -> None:
    assert [bug.id for bug in parse_bugs("r2, R1")] == ["R1", "R2"]
    assert parse_bugs("all") == BUGS


@pytest.mark.parametrize("bug", parse_bugs(",".join(SAMPLE)), ids=lambda bug: bug.id)
def test_a_sample_of_historical_bugs_is_noticed(fork_server: ForkServer, bug: Bug) -> None:
    assert first_failure(fork_server, bug.changes, QUICK, WorkerSettings()) is not None


@pytest.mark.parametrize("name", UNLISTED)
def test_a_bug_on_no_list_still_fits_the_source(name: str, tmp_path) -> None:
    copy_of_core(tmp_path, UNLISTED[name])


def test_a_change_that_changes_nothing_is_not_noticed(fork_server: ForkServer) -> None:
    harmless = Change("runtime/grad_pipeline.py", "IN_FLIGHT = 1\n", "IN_FLIGHT = 2\n")
    sample = [case for case in QUICK if case.ranks == 2 and case.policy == "fp64"][:3]
    assert first_failure(fork_server, (harmless,), sample, WorkerSettings()) is None


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", [b for b in BUGS if b.changes], ids=lambda bug: bug.id)
def test_every_historical_bug_is_noticed(fork_server: ForkServer, bug: Bug) -> None:
    assert first_failure(fork_server, bug.changes, QUICK, WorkerSettings()) is not None


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", UNLISTED)
def test_every_bug_on_no_list_is_noticed(fork_server: ForkServer, name: str) -> None:
    assert first_failure(fork_server, UNLISTED[name], QUICK, WorkerSettings()) is not None
