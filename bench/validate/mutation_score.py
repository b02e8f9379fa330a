"""`python -m bench.validate.mutation_score`: which small changes of mfsdp_core `validate` notices.

Every mutant of the sample meets the quick cases that call the function it is in, cheapest first, up
to the first failure. Results are lines of a file, so that a run goes on where the last one ended.

    --seed N --per-room N [--room ROOM]... --minutes N --out FILE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.store import ResultsStore
from bench.testing.call import Call
from bench.testing.workers import ForkServer
from bench.validate import rank
from bench.validate.called_functions import Function, traced
from bench.validate.cases import Case
from bench.validate.fuzz import rank as program_rank
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.fuzz.script import script
from bench.validate.injection import Control
from bench.validate.matrix import cases
from bench.validate.mutants import Mutant, sample, write
from bench.validate.mutation import CORE, copy_of_core
from bench.validate.session import MODULES, WorkerSettings, verdicts

_CASE_SECONDS = 30.0


def functions_by_case(
    fork_server: ForkServer, wanted: Sequence[Case | ProgramCase]
) -> dict[str, tuple[float, set[Function]]]:
    """Seconds, and functions that the first rank calls, of every case that runs."""
    found = {}
    with fork_server.workers(WorkerSettings().ranks, None, rank.prepare) as workers:
        for case in wanted:
            if isinstance(case, ProgramCase):
                arguments: tuple[Any, ...] = (script(case.program), case.engine)
                call = Call.of(program_rank.run, arguments)
            else:
                call = Call.of(rank.run, (case, "cpu"))
            start = time.monotonic()
            answers = workers.run(traced, call, seconds=_CASE_SECONDS * 4, ranks=case.ranks)
            found[case.id] = time.monotonic() - start, set(answers[0])
    return found


def scored(
    fork_server: ForkServer,
    mutants: Sequence[Mutant],
    wanted: Sequence[Case | ProgramCase],
    reached: Mapping[str, tuple[float, set[Function]]],
    deadline: float,
) -> Iterator[dict[str, object]]:
    """What came of each mutant, as plain data; ends early after `deadline`."""
    by_id = {case.id: case for case in wanted}
    control = Control(fork_server, WorkerSettings(case_seconds=_CASE_SECONDS))
    for mutant in mutants:
        if time.monotonic() > deadline:
            return
        start = time.monotonic()
        # Few ranks first: going back to fewer confuses the names that torch gives to groups.
        calling = [
            (by_id[name].ranks, seconds, name)
            for name, (seconds, functions) in reached.items()
            if not mutant.function[0] or (mutant.file, *mutant.function) in functions
        ]
        chosen = [by_id[name] for _, _, name in sorted(calling)]
        told = _first_failure(fork_server, mutant, chosen, control)
        yield {
            "mutant": mutant.id,
            "room": mutant.room,
            "kind": mutant.kind,
            "function": mutant.function[0],
            "change": _change(mutant),
            "outcome": "caught" if told else "survived" if chosen else "not reached",
            **told,
            "cases": len(chosen),
            "seconds": round(time.monotonic() - start, 1),
        }


def _first_failure(
    fork_server: ForkServer,
    mutant: Mutant,
    chosen: Sequence[Case | ProgramCase],
    control: Control,
) -> dict[str, str]:
    """Case, check and finding; empty where nothing fails that passes without the change."""
    by_id = {case.id: case for case in chosen}
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy_of_core(Path(folder))
        write(mutant, Path(folder) / CORE.name)
        for verdict in verdicts(fork_server, chosen, control.workers, core=Path(folder)):
            if verdict.state == "failed" and control.passes(by_id[verdict.case]):
                failure = verdict.failures[0]
                said = failure.finding.found if failure.finding else ""
                return {"case": verdict.case, "check": failure.check, "found": said[:160]}
    return {}


def _change(mutant: Mutant) -> str:
    data = (CORE / mutant.file).read_bytes()[mutant.start : mutant.end].decode()
    return f"{' '.join(data.split())[:80]} -> {' '.join(mutant.text.split())[:80]}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Counts per room, as Markdown."""
    lines = ["| room | mutants | caught | survived | not reached | caught of reached |"]
    lines.append("|---|---|---|---|---|---|")
    rooms = sorted({result["room"] for result in results})
    for room in [*rooms, "all"]:
        own = [result["outcome"] for result in results if room in (result["room"], "all")]
        caught, survived = own.count("caught"), own.count("survived")
        share = f"{100 * caught / (caught + survived):.0f} %" if caught + survived else "-"
        counts = f"{len(own)} | {caught} | {survived} | {own.count('not reached')}"
        lines.append(f"| {room} | {counts} | {share} |")
    seconds = sum(result["seconds"] for result in results)
    return "\n".join([*lines, "", f"{seconds:.0f} s in all."])


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="mutation_score")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-room", type=int, default=30)
    parser.add_argument("--room", action="append", default=[])
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="results/mutation.jsonl if left out")
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * asked.minutes
    kept = asked.out or ResultsStore.open("results", create=True).root / "mutation.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = _results(kept)
    drawn = sample(asked.seed, asked.per_room, tuple(asked.room))
    left = [mutant for mutant in drawn if mutant.id not in {one["mutant"] for one in known}]
    sys.stderr.write(f"{len(drawn)} mutants, {len(drawn) - len(left)} known already\n")
    if left:
        with ForkServer(modules=MODULES) as fork_server, kept.open("a") as out:
            quick = cases("mfsdp", full=False)
            reached = _known_functions(fork_server, quick, kept.with_suffix(".functions.json"))
            for result in scored(fork_server, left, quick, reached, deadline):
                out.write(json.dumps(result) + "\n")
                out.flush()
                sys.stderr.write(f"{result['outcome']}: {result['mutant']}\n")
    wanted = {mutant.id for mutant in drawn}
    sys.stdout.write(table([one for one in _results(kept) if one["mutant"] in wanted]) + "\n")
    return 0


def _known_functions(
    fork_server: ForkServer, wanted: Sequence[Case | ProgramCase], cache: Path
) -> dict[str, tuple[float, set[Function]]]:
    """`functions_by_case`, kept in `cache` for as long as core and cases stay what they are."""
    sources = b"".join(path.read_bytes() for path in sorted(CORE.rglob("*.py")))
    key = hashlib.sha256(sources + " ".join(case.id for case in wanted).encode()).hexdigest()
    if cache.exists():
        kept = json.loads(cache.read_text())
        if kept["key"] == key:
            cases_of = kept["cases"].items()
            return {name: (s, {(f, n, line) for f, n, line in fs}) for name, (s, fs) in cases_of}
    found = functions_by_case(fork_server, wanted)
    plain = {name: (seconds, sorted(functions)) for name, (seconds, functions) in found.items()}
    cache.write_text(json.dumps({"key": key, "cases": plain}))
    return found


def _results(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
