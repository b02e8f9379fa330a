"""`python -m bench.validate.mutation_score`: which small changes of mfsdp_core `validate` notices.

Every mutant of a seeded sample meets the quick cases that execute the changed line, up to the first
failure; what survives meets the further cases of `--full`, and then the tests of the core, where
`--stage` says so. Results are lines of a file, so that a run goes on where the last one ended.

    --seed N --per-room N [--room ROOM]... --minutes N --out FILE [--stage full|tests]
    --cases N            (or tests) that a mutant meets at most, chosen to be unlike each other; a
                         later run with more goes on with the others
    --of-full N          of the further cases of `--full`, as unlike each other as can be (120)
    --equivalent FILE    JSON: changes that no result depends on, each with the argument
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from scipy import stats

from bench.store import ResultsStore
from bench.testing.workers import ForkServer
from bench.validate import test_trial
from bench.validate.line_coverage import CoverageFile
from bench.validate.matrix import AnyCase, cases
from bench.validate.mutant_trial import Trials, cover, executing, spread
from bench.validate.mutants import Mutant, sample
from bench.validate.mutation import CORE
from bench.validate.session import MODULES

STAGES = ("quick", "full", "tests")
#: By the key of a mutant and the stage.
Results = dict[str, dict[str, Any]]


def main(arguments: list[str]) -> int:
    """The command."""
    asked = _parsed(arguments)
    deadline = time.monotonic() + 60 * asked.minutes
    kept = asked.out or ResultsStore.open("results", create=True).root / "mutation.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    drawn = sample(asked.seed, asked.per_room, tuple(asked.room))
    equivalent = json.loads(asked.equivalent.read_text()) if asked.equivalent else {}
    _try([mutant for mutant in drawn if key(mutant) not in equivalent], asked, kept, deadline)
    sys.stdout.write(table(drawn, _results(kept), equivalent) + "\n")
    return 0


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutation_score")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-room", type=int, default=30)
    parser.add_argument("--room", action="append", default=[])
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--stage", choices=STAGES, default="quick")
    parser.add_argument("--out", type=Path, help="results/mutation.jsonl if left out")
    parser.add_argument("--of-full", type=int, default=120)
    parser.add_argument("--equivalent", type=Path)
    return parser.parse_args(arguments)


def _try(drawn: Sequence[Mutant], asked: argparse.Namespace, kept: Path, deadline: float) -> None:
    results = _results(kept)
    left = [mutant for mutant in drawn if _is_left(results.get(key(mutant), {}), asked)]
    sys.stderr.write(f"{asked.stage}: {len(drawn)} mutants, {len(left)} to try\n")
    if not left:
        return
    stage = _on_tests if asked.stage == "tests" else _on_cases
    with stage(asked, kept, results, deadline) as (choose, trials), kept.open("a") as out:
        for mutant in left:
            if time.monotonic() > deadline:
                return
            chosen = choose(mutant)
            met: list[str] = results.get(key(mutant), {}).get(asked.stage, {}).get("met", [])
            unmet = [one for one in chosen if _version(one) not in met]
            unmet = unmet[: asked.cases - len(met)]
            if not unmet and asked.stage in results.get(key(mutant), {}):
                continue
            result = {
                "key": key(mutant),
                "mutant": mutant.id,
                "room": mutant.room,
                "function": mutant.function,
                "change": change(mutant),
                "stage": asked.stage,
                "cases": len(chosen),
                "met": [*met, *map(_version, unmet)],
                **trials.result(mutant, unmet),
            }
            if not chosen:
                result["outcome"] = "not reached"
            out.write(json.dumps(result) + "\n")
            out.flush()
            sys.stderr.write(f"{result['outcome']} ({result['seconds']} s): {mutant.id}\n")


@contextmanager
def _on_cases(
    asked: argparse.Namespace, kept: Path, results: Results, deadline: float
) -> Iterator[tuple[Callable[[Mutant], Sequence[Any]], Any]]:
    wanted = quick = cases("mfsdp", full=False)
    if asked.stage == "full":
        wanted = cases("mfsdp", full=True)
        wanted = list(islice(spread([one for one in wanted if one not in quick]), asked.of_full))
    known = CoverageFile(kept.with_suffix(".lines.jsonl"))
    with ForkServer(modules=MODULES) as fork_server:
        for case in cover(fork_server, wanted, known, deadline):
            sys.stderr.write(f"traced: {case.id}\n")
        caught = (one for tried in results.values() for one in tried.values() if "case" in one)
        trials = Trials(fork_server, {one["case"] for one in caught})
        yield lambda mutant: executing(mutant, wanted, known), trials


@contextmanager
def _on_tests(
    _asked: argparse.Namespace, kept: Path, _results: Results, deadline: float
) -> Iterator[tuple[Callable[[Mutant], Sequence[Any]], Any]]:
    with ForkServer(modules=test_trial.MODULES) as fork_server:
        trials = test_trial.TestTrials(fork_server, kept.with_suffix(".tests.jsonl"))
        trials.trace(deadline)
        yield trials.executing, trials


def _version(case: AnyCase | str) -> str:
    return case if isinstance(case, str) else case.id


def key(mutant: Mutant) -> str:
    """Names a change for as long as its file stays what it is."""
    source = (CORE / mutant.file).read_bytes()
    return hashlib.sha256(source + mutant.id.encode()).hexdigest()[:12]


def change(mutant: Mutant) -> str:
    """What stands there, and what instead."""
    data = (CORE / mutant.file).read_bytes()[mutant.start : mutant.end].decode()
    return f"{' '.join(data.split())[:80]} -> {' '.join(mutant.text.split())[:80]}"


def _is_left(tried: dict[str, Any], asked: argparse.Namespace) -> bool:
    """Noticed in no stage so far, and cases of this one may be left."""
    if _caught(tried, STAGES) or (asked.stage != "quick" and "quick" not in tried):
        return False
    own = tried.get(asked.stage)
    return own is None or len(own["met"]) < asked.cases


def _caught(tried: dict[str, Any], stages: Sequence[str]) -> bool:
    return any(tried.get(stage, {}).get("outcome") == "caught" for stage in stages)


def _results(file: Path) -> Results:
    found: Results = {}
    if file.exists():
        for text in file.read_text().splitlines():
            one = json.loads(text)
            of_mutant = found.setdefault(one["key"], {})
            one["seconds"] += of_mutant.get(one["stage"], {}).get("seconds", 0)
            of_mutant[one["stage"]] = one
    return found


def table(drawn: Sequence[Mutant], results: Results, equivalent: dict[str, Any]) -> str:
    """Counts per room, as Markdown; shares are of the mutants tried that are not equivalent.

    A share has its 95 % interval.
    """
    lines = [
        "| room | tried | equivalent | quick | full | tests | left | of these not reached by quick "
        "| share of quick | share in all |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    tried = [(m.room, results[key(m)]) for m in drawn if key(m) in results]
    rooms = sorted({room for room, _ in tried})
    for room in [*rooms, "all"]:
        own = [one for name, one in tried if room in (name, "all")]
        real = [one for one in own if one["quick"]["key"] not in equivalent]
        upto = [sum(_caught(one, STAGES[: n + 1]) for one in real) for n in range(len(STAGES))]
        missed = [one for one in real if not _caught(one, STAGES)]
        unreached = sum(one["quick"]["outcome"] == "not reached" for one in missed)
        cells = (
            room, len(own), len(own) - len(real), upto[0], upto[1] - upto[0], upto[2] - upto[1],
            len(missed), unreached, _share(upto[0], len(real)), _share(upto[2], len(real)),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    seconds = sum(stage["seconds"] for _, one in tried for stage in one.values())
    return "\n".join([*lines, "", f"{len(tried)} of {len(drawn)} tried, {seconds:.0f} s."])


def _share(count: int, total: int) -> str:
    """In percent, with the 95 % interval of Wilson (1927) for a proportion."""
    if not total:
        return "-"
    found = stats.binomtest(count, total).proportion_ci(0.95, method="wilson")
    return f"{100 * count / total:.0f} % ({100 * found.low:.0f} to {100 * found.high:.0f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
