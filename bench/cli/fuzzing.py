"""`validate --fuzz`: random training programs, and scripts of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.answer import Answer
from bench.cli.interrupts import stop_on_signals
from bench.cli.verbs.check import ValidationRequest
from bench.known_failures import PAGE

if TYPE_CHECKING:
    from bench.validate.fuzz.session import Tally

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
            found[engine], progress = Tally(), console.SometimesNoted()
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
