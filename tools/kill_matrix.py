"""Which detector notices which change of mfsdp_core: `python -m tools.kill_matrix FOLDER`.

Changes are the patches of `validate` first, then fresh mutants. Detectors, each asked separately:

    cases      of `validate`, quick, with their checks
    programs   of `validate`
    tests      of tests/core, without the nightly ones

Each is asked only with what executes a changed statement, up to the first failure that does not
occur without the change. Answers are lines of FOLDER/answers.jsonl, so that a run goes on where
the last one ended; `--table` prints what is known as Markdown and asks nothing.

    --mutants N --seed N   how many mutants, and which
    --patches FOLDER       the patches of a folder instead, and nothing else
    --most N               cases or tests that one change meets at most, of each detector
    --detector NAME...     some detectors alone
    --minutes N            begin no further question after so many
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.testing.workers import ForkServer
from bench.validate.bugs import BUGS, UNLISTED, Bug, bug_of
from bench.validate.cases import Case
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.matrix import AnyCase, cases
from bench.validate.patched_core import CORE, apply, copy_of_core
from bench.validate.session import MODULES
from tools.mutation import test_trials
from tools.mutation.case_trials import Trials, cover, executing
from tools.mutation.line_coverage import CoverageFile, Lines
from tools.mutation.mutants import Mutant, sample

KINDS: dict[str, type[AnyCase]] = {
    "cases": Case,
    "programs": ProgramCase,
}
DETECTORS = (*KINDS, "tests")
#: By change and detector.
Answers = dict[tuple[str, str], dict[str, Any]]
Question = Callable[[Mutant], dict[str, Any]]


@dataclass(frozen=True)
class Patched(Mutant):
    """A patch as a change. lines: statements that it changes, by file below mfsdp_core."""

    bug: Bug
    lines: Mapping[str, frozenset[int]]

    @property
    def id(self) -> str:
        """The name of the patch."""
        return self.bug.id

    def is_on(self, lines: Mapping[str, set[int]]) -> bool:
        """Whether a changed statement is among executed lines."""
        return any(own & lines.get(file, set()) for file, own in self.lines.items())

    def write(self, core: Path) -> None:
        """Apply the patch."""
        apply(core.parent, self.bug.patch)


def patched(bug: Bug) -> Patched:
    """The change that `bug` is; its file is the one with most changed lines."""
    lines: Lines = {}
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy = copy_of_core(Path(folder), bug.patch)
        for path in sorted(copy.rglob("*.py")):
            file = str(path.relative_to(copy))
            old = (CORE / file).read_text() if (CORE / file).exists() else ""
            found = changed_statements(old, path.read_text())
            if found:
                lines[file] = found
    main = max(lines, key=lambda file: len(lines[file]))
    inside = all(is_in_functions((CORE / f).read_text(), own) for f, own in lines.items())
    numbers = {file: frozenset(own) for file, own in lines.items()}
    place = (min(lines[main]), "inside" if inside else "")
    return Patched(main, "patch", *place, (0, 0), 0, 0, "", bug, numbers)


def changed_statements(old: str, new: str) -> set[int]:
    """Lines, from 1, of the statements of `old` that `new` changes, or puts others beside."""
    before, after = old.splitlines(), new.splitlines()
    changed: set[int] = set()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, first, last, _, _ in matcher.get_opcodes():
        if tag == "insert":
            changed |= {first, first + 1}
        elif tag != "equal":
            changed |= set(range(first + 1, last + 1))
    around = [range(low, high + 1) for low, high in _statements(old)]
    return changed.union(*(lines for lines in around if not changed.isdisjoint(lines)))


def is_in_functions(source: str, lines: set[int]) -> bool:
    """Whether every line is in the body of a function, so that tracing a call sees it."""
    bodies = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    }
    return bool(lines & bodies)


def _statements(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of every simple statement, and of the heads of blocks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            yield node.lineno, max(node.lineno, last)


def on_cases(
    fork_server: ForkServer, kind: str, known: CoverageFile, most: int, trials: Trials
) -> Question:
    """Asks the cases of one kind."""
    of_kind = [one for one in cases("mfsdp", full=False) if isinstance(one, KINDS[kind])]
    for case in cover(fork_server, of_kind, known, float("inf")):
        sys.stderr.write(f"traced: {case.id}\n")

    def options(change: Mutant) -> dict[str, Any]:
        chosen = executing(change, of_kind, known)
        return {"of": len(chosen), **trials.result(change, chosen[:most])}

    return options


def on_tests(folder: Path, fork_server: ForkServer, most: int) -> Question:
    """Asks the tests of the core."""
    trials = test_trials.TestTrials(fork_server, folder / "tests.jsonl")
    trials.trace(float("inf"))

    def options(change: Mutant) -> dict[str, Any]:
        chosen = trials.executing(change)
        return {"of": len(chosen), **trials.result(change, chosen[:most])}

    return options


def changes(seed: int, mutants: int, folder: Path | None = None) -> list[Mutant]:
    """All patches, and mutants of every room in turn; of `folder` its patches alone."""
    if folder is not None:
        return [patched(bug_of(patch)) for patch in sorted(folder.glob("*.patch"))]
    drawn = islice(sample(seed, mutants), mutants)
    of_tests = map(bug_of, sorted((CORE.parent / "tests/core/patches").glob("*.patch")))
    return [*map(patched, (*BUGS, *UNLISTED, *of_tests)), *drawn]


def ask(folder: Path, options: argparse.Namespace) -> None:
    """Every question that has no answer yet, patches before mutants; answers are appended."""
    deadline = time.monotonic() + 60 * options.minutes
    file, wanted = folder / "answers.jsonl", changes(options.seed, options.mutants, options.patches)
    known, coverage = answers(folder), CoverageFile(folder / "cases.jsonl")
    detectors: dict[str, Question] = {}
    with ExitStack() as stack:
        server = stack.enter_context(ForkServer(modules=MODULES))
        of_tests = stack.enter_context(ForkServer(modules=test_trials.MODULES))
        trials = Trials(server, {one["case"] for one in known.values() if "case" in one})
        for are_patches in (True, False):
            own = [one for one in wanted if isinstance(one, Patched) == are_patches]
            for name, change in ((name, one) for name in options.detector for one in own):
                if (change.id, name) in known:
                    continue
                if time.monotonic() > deadline:
                    return
                if name not in detectors:
                    detectors[name] = (
                        on_tests(folder, of_tests, options.most)
                        if name == "tests"
                        else on_cases(server, name, coverage, options.most, trials)
                    )
                answer = {"change": change.id, "detector": name, **detectors[name](change)}
                with file.open("a") as out:
                    out.write(json.dumps(answer) + "\n")
                sys.stderr.write(
                    f"{name}: {answer['outcome']} ({answer['seconds']} s) {change.id}\n"
                )


def answers(folder: Path) -> Answers:
    """What is known; of two answers to one question the later."""
    file = folder / "answers.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {(one["change"], one["detector"]): one for one in map(json.loads, lines)}


def table(known: Answers, wanted: Sequence[Mutant]) -> str:
    """Who notices what; `-` was asked and did not, empty was not asked, 0 had nothing to ask.

    Detectors are those of the answers, so that a file of an older tree can be told as well.
    """
    names = [*dict.fromkeys(name for _, name in known)]
    lines = [_row("change", names), "|---" * (len(names) + 1) + "|"]
    lines += [_row(one.id, [_cell(known.get((one.id, name))) for name in names]) for one in wanted]
    return "\n".join([*summary(known, wanted, names), "", *lines])


def summary(known: Answers, wanted: Sequence[Mutant], names: Sequence[str]) -> list[str]:
    """Counts: of patches and mutants, what each detector notices, and notices alone."""
    lines = [_row("", ["asked", *names]), "|---" * (len(names) + 2) + "|"]
    for what, is_patch in (("patches", True), ("mutants", False)):
        ids = [one.id for one in wanted if isinstance(one, Patched) == is_patch]
        by_change = {
            one: {name: known[one, name] for name in names if (one, name) in known} for one in ids
        }
        whole = {one: found for one, found in by_change.items() if len(found) == len(names)}
        caught = {
            one: {name for name, answer in found.items() if answer["outcome"] == "caught"}
            for one, found in whole.items()
        }
        counts = [sum(name in found for found in caught.values()) for name in names]
        alone = [sum(found == {name} for found in caught.values()) for name in names]
        lines.append(_row(f"{what} noticed", [f"{len(whole)} of {len(ids)}", *counts]))
        lines.append(_row(f"{what} noticed by this one alone", ["", *alone]))
        nobody = sum(not found for found in caught.values())
        lines.append(_row(f"{what} that nobody noticed", [nobody, *("" for _ in names)]))
    return lines


def _row(first: str, cells: Sequence[object]) -> str:
    return "| " + " | ".join([first, *map(str, cells)]) + " |"


def _cell(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return ""
    if answer["outcome"] == "caught":
        return f"`{answer['case'].removeprefix('tests/core/').removeprefix('mfsdp/')}`"
    return "-" if answer["of"] else "0"


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--patches", type=Path)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--detector", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        ask(options.folder, options)
    print(table(answers(options.folder), changes(options.seed, options.mutants, options.patches)))


if __name__ == "__main__":
    main()
