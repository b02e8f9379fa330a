"""`validate`: is an engine right, by cases or by random programs?"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cli import console, exit_codes
from bench.cli.verb import Answer, ResultsOption, argument, option
from bench.errors import UsageError
from reports.renderers.document import Code

if TYPE_CHECKING:
    from bench.validate.cases import AnyCase
    from bench.validate.fuzzing import Tally
    from bench.verdict import CaseVerdict, ValidationRecord

_REFUSALS_SHOWN = 8


class ValidateVerb(ResultsOption, name="validate"):
    """Check engines against plain torch, case by case.

    Gradients, weights, bytes on the wire and memory are checked.

    Examples:
        validate
        validate fsdp2 ddp --full
    """

    engines: tuple[str, ...] = argument(
        "ENGINE", "mfsdp (if left out), another engine, or package.module:factory.", ()
    )
    full: bool = option("--full", "All cases, not only those that touch every axis.", False)
    ranks: int | None = option("--ranks N", "Ranks at most; 4 on a CPU if left out.", min=1, max=64)
    patterns: tuple[str, ...] = option("--case PATTERN", "Cases whose id matches.", ())
    case_seconds: float = option(
        "--case-seconds N", "Time after which a case counts as hung.", 30.0, min=1
    )
    errors: bool = option(
        "--errors", "A table of gradient errors: worst step, max abs, relative.", False
    )
    fuzz: int | None = option("--fuzz N", "Run N random training programs instead of cases.", min=1)
    seed: int = option("--seed S", "Of the random programs.", 0)
    list_only: bool = option("--list", "Print the ids of the cases.", False)

    def run(self) -> Answer:
        """1 if a case or a program failed, 3 if none applies."""
        if self.fuzz is not None:
            if self.full or self.patterns or self.list_only or self.errors:
                raise UsageError(
                    "--fuzz runs random programs: leave --full, --case, --list, --errors"
                )
            return self.run_fuzz(checked_engines(self.engines), self.fuzz)
        from bench.cli.interrupts import stop_on_signals
        from bench.store.run_folder import utc_now
        from bench.validate.matrix import cases, select
        from bench.verdict import ValidationRecord

        engines = checked_engines(self.engines)
        chosen = select([c for e in engines for c in cases(e, full=self.full)], self.patterns)
        if self.list_only:
            ids = [case.id for case in chosen]
            return Answer([Code("\n".join(ids))], {"cases": ids})
        store = self.store(create=True)
        record = ValidationRecord(
            id=store.validations.new_id(),
            engines=engines,
            wanted=("full" if self.full else "quick") + (", a selection" if self.patterns else ""),
            started_utc=utc_now(),
            environment=_environment(),
        )
        stop = threading.Event()
        with stop_on_signals(stop):
            device, verdicts = self._verdicts(engines, chosen, stop)
        record = record.model_copy(
            update={
                "device": device,
                "cases": verdicts,
                "ended_utc": utc_now(),
                "interrupted": stop.is_set(),
            }
        )
        path, counts = store.validations.write(record), record.counts()
        code = _code(stop, failed=counts["failed"], passed=counts["passed"])
        return replace(of_validation(record), code=code, remarks=(f"kept in {path}",))

    def _verdicts(
        self, engines: Sequence[str], cases: Sequence[AnyCase], stop: threading.Event
    ) -> tuple[str, tuple[CaseVerdict, ...]]:
        """The device, and a verdict of each case until `stop` is set."""
        from bench.testing.workers import ForkServer
        from bench.validate.session import MODULES, WorkerSettings, check_that_they_load, verdicts

        workers = WorkerSettings.of_this_machine(self.ranks, self.case_seconds)
        progress, ended = console.ThrottledLog(), []
        with ForkServer(workers.device, (str(Path.cwd()),), MODULES) as fork_server:
            check_that_they_load(fork_server, engines)
            for verdict in verdicts(fork_server, cases, workers, stop=stop, errors=self.errors):
                ended.append(verdict)
                failed = verdict.state == "failed"
                text = f"FAILED {verdict.case}" if failed else verdict.case
                progress.say(f"{len(ended)} of {len(cases)}: {text}", now=failed)
        return workers.device, tuple(ended)

    def run_fuzz(self, engines: Sequence[str], count: int) -> Answer:
        """Run `count` programs on each engine; the script of every way of failing is kept.

        Raises:
            UsageError: an engine that cannot be loaded, or not a results folder.
        """
        from bench.cli.interrupts import stop_on_signals
        from bench.testing.workers import ForkServer
        from bench.validate.fuzzing import Tally, fuzz
        from bench.validate.outcomes import resident
        from bench.validate.session import MODULES, check_that_they_load

        folder = self.store(create=True).root / "fuzz"
        tallies: dict[str, Tally] = {}
        stop = threading.Event()
        with (
            stop_on_signals(stop),
            ForkServer(paths=(str(Path.cwd()),), modules=MODULES) as fork_server,
            resident(fork_server) as workers,
        ):
            check_that_they_load(fork_server, engines)
            for engine in engines:
                tallies[engine], progress = Tally(), console.ThrottledLog()
                numbers = takewhile(lambda _: not stop.is_set(), range(count))
                for tally in fuzz(workers, engine, self.seed, numbers, tallies[engine]):
                    progress.say(f"{engine}: {tally.ran} of {count}, {_counts(tally)}")
        data: dict[str, Any] = {}
        lines: list[str] = []
        for engine, tally in tallies.items():
            lines.append(f"{engine}: {tally.ran} programs of seed {self.seed}: {_counts(tally)}")
            name = f"{engine}-{self.seed}".replace(":", "-").replace(".", "-")
            data[engine], more = _of_tally(tally, folder, name)
            lines += more
        failed = sum(len(tally.failures) for tally in tallies.values())
        equal = sum(tally.counts.get("equal", 0) for tally in tallies.values())
        code = _code(stop, failed=failed, passed=equal)
        return Answer([Code("\n".join(lines))], {"seed": self.seed, "engines": data}, code)


def _code(stop: threading.Event, *, failed: int, passed: int) -> int:
    if stop.is_set():
        return exit_codes.INTERRUPTED
    if failed:
        return exit_codes.REQUIREMENT_NOT_MET
    return exit_codes.OK if passed else exit_codes.NOTHING_MEASURED


def of_validation(record: ValidationRecord) -> Answer:
    """A validation as it was kept."""
    from reports.sections.validation import validation_blocks

    return Answer(validation_blocks(record), record.model_dump(mode="json"))


def checked_engines(names: Sequence[str]) -> tuple[str, ...]:
    """Engines by name, each once; mfsdp if none is named.

    Raises:
        UsageError: an unknown one, or one whose code is not here.
    """
    from bench.resolve.import_path import problem_of
    from bench.spec import engine_names
    from sweeps.suggest import did_you_mean

    engines = tuple(names) or ("mfsdp",)
    for engine in engines:
        if engine not in engine_names() and ":" not in engine:
            raise UsageError(
                f"unknown engine {engine!r}{did_you_mean(engine, engine_names())}: expected one of "
                f"{', '.join(engine_names())}, or package.module:factory of an engine of your own"
            )
        problem = problem_of(engine) if ":" in engine else None
        if problem is not None:
            raise UsageError(f"engine {engine} cannot be loaded: {problem}")
    return tuple(dict.fromkeys(engines))


def _environment() -> dict[str, object]:
    from bench.launch.code import checkout_root
    from bench.launch.environment import package_versions
    from bench.launch.git import git_state
    from bench.resolve.machine import Machine

    machine = Machine.detect()
    return {
        "hostname": machine.hostname,
        "cpu_name": machine.cpu_name,
        "cpu_count": machine.cpu_count,
        "cuda_devices": [gpu.name for gpu in machine.cuda_devices],
        "packages": package_versions(),
        "git": git_state(checkout_root()),
    }


def _counts(tally: Tally) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(tally.counts.items()))


def _of_tally(tally: Tally, folder: Path, name: str) -> tuple[dict[str, Any], list[str]]:
    """Data and lines; the script of every way of failing is written."""
    from bench.known_failures import PAGE

    most = sorted(tally.refusals.items(), key=lambda item: -item[1])[:_REFUSALS_SHOWN]
    lines = [f"  refused {count} times: {text}" for text, count in most]
    lines += [f"  what is known: {PAGE}"] if tally.failures else []
    failures = []
    for failure in tally.failures:
        folder.mkdir(parents=True, exist_ok=True)
        path, outcome = folder / f"{name}-{failure.number}.py", failure.outcome
        path.write_text(failure.script, encoding="utf-8")
        lines += ["", f"{outcome.kind}: {outcome.lines[0].splitlines()[0]}"]
        lines.append(f"  in {len(failure.numbers)} programs, the first is {failure.number}")
        lines += [f"  shrunk, {path}:", "", failure.script]
        row = {"kind": outcome.kind, "text": "\n".join(outcome.lines)}
        failures.append(row | {"programs": failure.numbers, "script": str(path)})
    data = {"programs": tally.ran, "counts": tally.counts, "refusals": tally.refusals}
    return data | {"failures": failures}, lines
