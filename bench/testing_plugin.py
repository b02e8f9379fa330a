"""The validator as a pytest plug-in: its cases and random programs are tests of any repository.

`-p bench.testing_plugin` loads it: no entry point does, which would break every pytest of an
environment where another package is called `bench`. `--fsdp-engine package.module:factory` collects
the checks; `fsdp_oracle` makes them a test function of a file; the fixture `gloo_ranks` calls a
function on ranks. docs/validate.md shows all three. Nothing else is loaded before
one of them is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bench.testing.workers import ForkServer, Workers
    from bench.validate.cases import AnyCase
    from bench.validate.fuzzing import Tally

_PROGRAMS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plug-in."""
    group = parser.getgroup("fsdp", "an FSDP implementation, checked against plain torch")
    group.addoption(
        "--fsdp-engine",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="collect cases and random programs for this engine",
    )
    group.addoption("--fsdp-full", action="store_true", help="the long matrix of cases")
    group.addoption(
        "--fsdp-programs", type=int, default=_PROGRAMS, help="random programs per engine"
    )
    group.addoption("--fsdp-seed", type=int, default=1, help="that programs are drawn from")
    group.addoption("--fsdp-ranks", type=int, help="ranks at most; 4, or one per CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse engines that cannot be found, before anything starts."""
    config.addinivalue_line("markers", "fsdp: a case or a random program of an FSDP engine")
    for engine in config.getoption("fsdp_engine", []):
        _checked(engine)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End all ranks."""
    oracle = config.stash.get(_ORACLE, None)
    if oracle is not None:
        oracle.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks of `--fsdp-engine`, before `-k` and `-m` select."""
    for engine in config.getoption("fsdp_engine", []):
        # With the name as its whole id, so that one test reads `engine::case`.
        parent = _Engine.from_parent(session, name=engine, nodeid=engine)
        items.extend(parent.collect())


@dataclass(frozen=True)
class Check:
    """One case of an engine, or the random program `number` of `seed`."""

    engine: str
    case: AnyCase | None = None
    seed: int = 0
    number: int = 0

    @property
    def id(self) -> str:
        """The case's own without the engine, or `program/1-7`."""
        if self.case is None:
            return f"program/{self.seed}-{self.number}"
        return self.case.id.removeprefix(f"{self.engine}/")


def fsdp_oracle(
    engine: str, *, full: bool = False, programs: int = _PROGRAMS, seed: int = 1
) -> Callable[..., None]:
    """A test function with one parameter set per case and random program of `engine`.

        test_my_fsdp = fsdp_oracle("my_package.my_fsdp:engine")

    Args:
        engine: its name, or the import path of its factory.
        full: the long matrix of cases.
        programs: random programs after the cases; one that fails is shrunk.
        seed: that they are drawn from.

    Raises:
        pytest.UsageError: nobody offers the engine.
    """
    checks = _checks(engine, full=full, programs=programs, seed=seed)

    @pytest.mark.fsdp
    @pytest.mark.parametrize("check", checks, ids=lambda check: check.id)
    def test(check: Check, pytestconfig: pytest.Config) -> None:
        _oracle(pytestconfig).ask(check)

    return test


@pytest.fixture(scope="session")
def gloo_ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """`gloo_ranks(function, *arguments, ranks=2, seconds=60.0)`: what each rank returned, in order.

    The function is one of a module. Ranks are processes in a gloo group of their own; they live on
    for the next call, and are made anew after one that raised, died or took too long.
    """
    return _oracle(pytestconfig).on_ranks


def _checks(engine: str, *, full: bool, programs: int, seed: int) -> list[Check]:
    _checked(engine)
    from bench.validate.matrix import cases

    checks = [Check(engine, case) for case in cases(engine, full=full)]
    return checks + [Check(engine, None, seed, number) for number in range(programs)]


def _checked(engine: str) -> None:
    from bench.cli.validate import checked_engines
    from bench.errors import UsageError

    try:
        checked_engines((engine,))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


class _Engine(pytest.Collector):
    """The checks of an engine of the command line."""

    def collect(self) -> Iterator[_Item]:
        option = self.config.getoption
        for check in _checks(
            self.name,
            full=option("fsdp_full"),
            programs=option("fsdp_programs"),
            seed=option("fsdp_seed"),
        ):
            yield _Item.from_parent(self, name=check.id, check=check)


class _Item(pytest.Item):
    def __init__(self, *, check: Check, **of_node: Any) -> None:
        super().__init__(**of_node)
        self.check = check
        self.add_marker("fsdp")

    def runtest(self) -> None:
        _oracle(self.config).ask(self.check)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid


class Oracle:
    """Resident ranks, and what judges them; both begin with the first question."""

    def __init__(self, ranks: int | None) -> None:
        """ranks: at most."""
        self._ranks = ranks
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, ForkServer] = {}
        self._workers: dict[tuple[str, int, bool], Workers] = {}
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._loaded: set[str] = set()

    def ask(self, check: Check) -> None:
        """Fail the test with what is wrong, or skip it with why it does not apply."""
        with _left_alone():
            case = check.case
            wrong, does_not_apply = self._case(case) if case else self._program(check)
        if wrong:
            pytest.fail(wrong, pytrace=False)
        if does_not_apply:
            pytest.skip(does_not_apply)

    def on_ranks(
        self, function: Callable[..., Any], *arguments: Any, ranks: int = 2, seconds: float = 60.0
    ) -> list[Any]:
        """As `gloo_ranks` says.

        Raises:
            pytest.UsageError: more ranks than there may be.
            WorkersError: not every rank returned; its text has what each of them said.
        """
        most = self._ranks or 4
        if ranks > most:
            raise pytest.UsageError(f"expected at most --fsdp-ranks {most} ranks, found {ranks}")
        workers = self._resident("cpu", most, plain=True)
        return workers.run(function, *arguments, seconds=seconds, ranks=ranks)

    def close(self) -> None:
        """End everything that was started."""
        self._stack.close()

    def _server(self, device: str) -> ForkServer:
        from bench.testing.workers import ForkServer
        from bench.validate.session import MODULES

        if device not in self._servers:
            # Test files import as pytest does: from the folders that it has added by now.
            paths = (str(Path.cwd()), *filter(None, sys.path))
            self._servers[device] = self._stack.enter_context(ForkServer(device, paths, MODULES))
        return self._servers[device]

    def _resident(self, device: str, ranks: int, *, plain: bool = False) -> Workers:
        """plain: as torch starts them, for functions of the tests."""
        from bench.validate.outcomes import resident

        wanted = device, ranks, plain
        if wanted not in self._workers:
            server = self._server(device)
            made = server.workers(ranks) if plain else resident(server, ranks)
            self._workers[wanted] = self._stack.enter_context(made)
        return self._workers[wanted]

    def _case(self, case: AnyCase) -> tuple[str, str]:
        """What is wrong, and why it does not apply; "" for neither."""
        import torch

        from bench.resolve.machine import Machine
        from bench.validate.judge import judge
        from bench.validate.session import DEFAULT_CASE_SECONDS, WorkerSettings, outcome_here
        from reports.sections.validation import failure_text

        settings = WorkerSettings.of_this_machine(self._ranks, DEFAULT_CASE_SECONDS)
        self._load(case.engine, settings.device)
        torch.set_num_threads(1)
        ranks = self._resident(settings.device, settings.ranks)
        outcome = outcome_here(settings, Machine.detect(), ranks, case)
        verdict = judge(case, outcome, torch.device(settings.device))
        return failure_text(verdict) if verdict.failures else "", verdict.reason

    def _program(self, check: Check) -> tuple[str, str]:
        """As `_case`; equal failures are shrunk once."""
        from bench.validate.fuzzing import Tally, fuzz
        from bench.validate.outcomes import DEFAULT_CPU_RANKS
        from bench.validate.script import text

        self._load(check.engine, "cpu")
        tally = self._tallies.setdefault((check.engine, check.seed), Tally())
        before = dict(tally.refusals)
        ranks = self._resident("cpu", DEFAULT_CPU_RANKS)
        for _ in fuzz(ranks, check.engine, check.seed, [check.number], tally):
            pass
        for failure in tally.failures:
            if check.number in failure.numbers:
                handle, name = tempfile.mkstemp(".py", f"program-{check.seed}-{failure.number}-")
                os.close(handle)
                Path(name).write_text(failure.script, encoding="utf-8")
                first, *more = failure.outcome.lines
                shrunk = f"shrunk, and a script to run alone in {name}:\n\n{text(failure.program)}"
                return "\n".join((f"{failure.outcome.kind}: {first}", *more, shrunk)), ""
        return "", next((said for said, n in tally.refusals.items() if n > before.get(said, 0)), "")

    def _load(self, engine: str, device: str) -> None:
        from bench.errors import UsageError
        from bench.validate.session import check_that_they_load

        if engine in self._loaded:
            return
        try:
            check_that_they_load(self._server(device), [engine])
        except UsageError as error:
            pytest.fail(str(error), pytrace=False)
        self._loaded.add(engine)


_ORACLE = pytest.StashKey[Oracle]()


def _oracle(config: pytest.Config) -> Oracle:
    return config.stash.setdefault(_ORACLE, Oracle(config.getoption("fsdp_ranks", None)))


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    """Judging draws from torch's generator, on one thread: other tests see nothing of it."""
    import torch

    threads = torch.get_num_threads()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(threads)
