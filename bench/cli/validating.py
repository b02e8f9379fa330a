"""`validate`: is an engine right, by cases or by random programs?"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.console import Answer
from bench.cli.interrupts import stop_on_signals
from bench.cli.verbs.check import ValidationRequest
from bench.errors import UsageError
from bench.known_failures import PAGE
from bench.launch.code import checkout_root
from bench.launch.environment import package_versions
from bench.launch.git import git_state
from bench.resolve.import_path import problem_of
from bench.resolve.machine import Machine
from bench.spec import engine_names
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from bench.verdict import CaseVerdict, ValidationRecord
from sweeps.suggest import did_you_mean

if TYPE_CHECKING:
    from bench.validate.fuzz.session import Tally
    from bench.validate.matrix import AnyCase


def run_validation(request: ValidationRequest) -> Answer:
    """Check engines; the exit code says the result.

    Raises:
        UsageError: an unknown engine or case, or options that exclude each other.
    """
    if request.fuzz is not None:
        if request.full or request.patterns or request.list_only:
            raise UsageError("--fuzz runs random programs: leave --full, --case, --list")
        return run_fuzz(request, checked_engines(request.engines), request.fuzz)
    from bench.validate.matrix import cases, select

    engines = checked_engines(request.engines)
    chosen = select([c for e in engines for c in cases(e, full=request.full)], request.patterns)
    if request.list_only:
        ids = [case.id for case in chosen]
        return Answer(lambda: {"cases": ids}, lambda: "\n".join(ids))
    store = ResultsStore.open(request.results, create=True)
    record = ValidationRecord(
        id=store.validations.new_id(),
        engines=engines,
        wanted=("full" if request.full else "quick")
        + (", a selection" if request.patterns else ""),
        started_utc=utc_now(),
        environment=_environment(),
    )
    stop = threading.Event()
    with stop_on_signals(stop):
        record = _run(request, record, chosen, stop)
    record = record.model_copy(update={"ended_utc": utc_now(), "interrupted": stop.is_set()})
    path = store.validations.write(record)
    return replace(
        of_validation(record),
        code=exit_codes.INTERRUPTED if stop.is_set() else exit_code(record),
        remarks=(f"kept in {path}",),
    )


def exit_code(record: ValidationRecord) -> int:
    """1 if a case failed, 3 if none applies."""
    counts = record.counts()
    if counts["failed"]:
        return exit_codes.REQUIREMENT_NOT_MET
    return exit_codes.OK if counts["passed"] else exit_codes.NOTHING_MEASURED


def of_validation(record: ValidationRecord) -> Answer:
    """A validation as it was kept."""
    from reports.sections.validation import to_terminal

    return Answer(lambda: record.model_dump(mode="json"), lambda: to_terminal(record))


def checked_engines(names: Sequence[str]) -> tuple[str, ...]:
    """Engines as asked for, each once; mfsdp if none is.

    Raises:
        UsageError: an unknown one, or one whose code is not here.
    """
    engines = tuple(names) or ("mfsdp",)
    for engine in engines:
        if engine not in engine_names() and ":" not in engine:
            raise UsageError(
                f"unknown engine {engine!r}{did_you_mean(engine, engine_names())}: expected one of "
                f"{', '.join(engine_names())}, or package.module:factory of an engine of your own"
            )
        found = problem_of(engine) if ":" in engine else None
        if found is not None:
            raise UsageError(f"engine {engine} cannot be loaded: {found}")
    return tuple(dict.fromkeys(engines))


def _run(
    request: ValidationRequest,
    record: ValidationRecord,
    cases: Sequence[AnyCase],
    stop: threading.Event,
) -> ValidationRecord:
    from bench.testing.workers import ForkServer
    from bench.validate.session import MODULES, WorkerSettings, check_that_they_load, verdicts

    workers = WorkerSettings.of_this_machine(request.ranks, request.case_seconds)
    progress, total = console.ThrottledLog(), len(cases)
    found: list[CaseVerdict] = []
    with ForkServer(workers.device, (str(Path.cwd()),), MODULES) as fork_server:
        check_that_they_load(fork_server, record.engines)
        for verdict in verdicts(fork_server, cases, workers, stop=stop):
            found.append(verdict)
            failed = verdict.state == "failed"
            text = f"FAILED {verdict.case}" if failed else verdict.case
            progress.say(f"{len(found)} of {total}: {text}", now=failed)
    return record.model_copy(update={"device": workers.device, "cases": tuple(found)})


def _environment() -> dict[str, object]:
    machine = Machine.detect()
    return {
        "hostname": machine.hostname,
        "cpu_name": machine.cpu_name,
        "cpu_count": machine.cpu_count,
        "cuda_devices": [gpu.name for gpu in machine.cuda_devices],
        "packages": package_versions(),
        "git": git_state(checkout_root()),
    }


_REFUSALS_SHOWN = 8


def run_fuzz(asked: ValidationRequest, engines: Sequence[str], count: int) -> Answer:
    """Run `count` programs on each engine; the exit code says whether one failed.

    Raises:
        UsageError: an engine that cannot be loaded, or not a results folder.
    """
    from bench.store import ResultsStore
    from bench.testing.workers import ForkServer
    from bench.validate.fuzz.session import MODULES, Fuzzer, Tally
    from bench.validate.session import check_that_they_load

    folder = ResultsStore.open(asked.results, create=True).root / "fuzz"
    found: dict[str, Tally] = {}
    stop = threading.Event()
    with (
        stop_on_signals(stop),
        ForkServer(paths=(str(Path.cwd()),), modules=MODULES) as fork_server,
        Fuzzer(fork_server) as fuzzer,
    ):
        check_that_they_load(fork_server, engines)
        for engine in engines:
            found[engine], progress = Tally(), console.ThrottledLog()
            for tally in fuzzer.fuzz(engine, asked.seed, range(count), stop):
                found[engine] = tally
                progress.say(f"{engine}: {tally.ran} of {count}, {_counts(tally)}")
    scripts = {engine: _written(folder, engine, asked.seed, one) for engine, one in found.items()}
    return Answer(
        lambda: _document(found, scripts, asked.seed),
        lambda: "\n".join(
            _text(engine, asked.seed, tally, scripts[engine]) for engine, tally in found.items()
        ),
        exit_codes.INTERRUPTED if stop.is_set() else _code(found.values()),
    )


def _code(found: Collection[Tally]) -> int:
    if any(tally.failures for tally in found):
        return exit_codes.REQUIREMENT_NOT_MET
    equal = sum(tally.counts.get("equal", 0) for tally in found)
    return exit_codes.OK if equal else exit_codes.NOTHING_MEASURED


def _counts(tally: Tally) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(tally.counts.items()))


def _written(folder: Path, engine: str, seed: int, tally: Tally) -> list[Path]:
    """The script of every way of failing."""
    paths = []
    for failure in tally.failures:
        folder.mkdir(parents=True, exist_ok=True)
        name = engine.replace(":", "-").replace(".", "-")
        path = folder / f"{name}-{seed}-{failure.number}.py"
        path.write_text(failure.script, encoding="utf-8")
        paths.append(path)
    return paths


def _text(engine: str, seed: int, tally: Tally, scripts: Sequence[Path]) -> str:
    lines = [f"{engine}: {tally.ran} programs of seed {seed}: {_counts(tally)}"]
    most = sorted(tally.refusals.items(), key=lambda item: -item[1])[:_REFUSALS_SHOWN]
    lines += [f"  refused {count} times: {text}" for text, count in most]
    lines += [f"  what is known: {PAGE}"] if tally.failures else []
    for failure, path in zip(tally.failures, scripts, strict=True):
        outcome = failure.outcome
        lines += ["", f"{outcome.kind}: {outcome.text.splitlines()[0]}"]
        lines.append(f"  in {len(failure.numbers)} programs, the first is {failure.number}")
        lines += [f"  shrunk, {path}:", "", path.read_text(encoding="utf-8")]
    return "\n".join(lines)


def _document(
    found: dict[str, Tally], scripts: dict[str, list[Path]], seed: int
) -> dict[str, object]:
    return {
        "seed": seed,
        "engines": {
            engine: {
                "programs": tally.ran,
                "counts": tally.counts,
                "refusals": tally.refusals,
                "failures": [
                    {
                        "kind": failure.outcome.kind,
                        "text": failure.outcome.text,
                        "programs": failure.numbers,
                        "script": str(path),
                    }
                    for failure, path in zip(tally.failures, scripts[engine], strict=True)
                ],
            }
            for engine, tally in found.items()
        },
    }
