"""Which detector notices which change of mfsdp_core: `python -m tools.kill_matrix FOLDER`.

Changes are the patches of `tests/core/patches`, then fresh mutants. Detectors, each run
separately:

    cases      of `validate`, quick, with their checks
    programs   of `validate`
    tests      of tests/core, without the nightly ones

Each runs only what executes a changed statement, up to the first failure that does not
occur without the change. Answers are lines of FOLDER/answers.jsonl, so that a run goes on where
the last one ended; `--table` prints what is known as Markdown and asks nothing.

    --mutants N --seed N   how many mutants, and which
    --patches FOLDER       the patches of a folder instead, and nothing else
    --most N               cases or tests that run for one change at most, of each detector
    --detector NAME...     some detectors alone
    --minutes N            begin no further question after so many
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.testing.call import FunctionCall
from bench.testing.hang_clock import stretched
from bench.testing.workers import ForkServer, WorkersError
from bench.validate import rank
from bench.validate.cases import AnyCase
from bench.validate.matrix import cases
from bench.validate.program import Program
from bench.validate.session import MODULES, WorkerSettings, verdicts
from tools.bug_in_a_copy import BUG_BY_ID, CORE, copy_of_core
from tools.executed_lines import Lines, Trace, executed
from tools.mutants import Mutant, sample

ROOT = CORE.parent
DETECTORS = ("cases", "programs", "tests")
#: By change and detector.
Answers = dict[tuple[str, str], dict[str, Any]]
#: Of a case or test: its id, and the lines that it executes.
Executed = dict[str, Lines]
#: What fails of these ids on the core of a folder and nowhere else: id, check, finding; or {}.
Detector = Callable[[Path, list[str]], dict[str, str]]
_CASE_SECONDS = 10.0
_TEST_SECONDS = 60.0
_PROCESSES = 2
_SIDE_BY_SIDE = ("-n", str(_PROCESSES), "--dist", "loadfile")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """A patch, or a mutant. sources: of the files that it changes, by name below mfsdp_core.

    lines: statements that it changes, by file. is_imported: an import executes some of them.
    """

    id: str
    is_patch: bool
    sources: Mapping[str, str]
    lines: Mapping[str, frozenset[int]]
    is_imported: bool

    @classmethod
    def of(cls, name: str, is_patch: bool, sources: Mapping[str, str]) -> Change:
        """The change to these sources."""
        before = {file: (CORE / file).read_text() for file in sources if (CORE / file).exists()}
        lines = {
            file: frozenset(changed_statements(old, sources[file])) for file, old in before.items()
        }
        is_imported = not all(is_in_functions(old, lines[file]) for file, old in before.items())
        return cls(name, is_patch, sources, lines, is_imported)

    @contextmanager
    def core(self) -> Iterator[Path]:
        """A folder with the changed core."""
        with tempfile.TemporaryDirectory(prefix="core-") as name:
            core = copy_of_core(Path(name))
            for file, source in self.sources.items():
                (core / file).write_text(source)
            yield Path(name)

    def executing(self, known: Executed) -> list[str]:
        """What executes a changed statement, or lines of its file where an import does.

        Every family has its turn. Those come first of whose lines the largest share lies in the
        changed files.
        """
        shares = {}
        for name, lines in known.items():
            own = sum(len(lines.get(file, ())) for file in self.lines)
            meets = any(numbers & set(lines.get(f, ())) for f, numbers in self.lines.items())
            if own and (meets or self.is_imported):
                shares[name] = own / sum(map(len, lines.values()))
        turns, met_before = {}, Counter[str]()
        for name in sorted(shares, key=lambda each: shares[each], reverse=True):
            family, file = _family(name), name.partition("::")[0]
            turns[name] = met_before[family], met_before[file]
            met_before.update({family, file})
        return sorted(turns, key=lambda each: turns[each])


def _family(name: str) -> str:
    """Tests that differ in parameters, cases on the same strategy and mesh."""
    return name.partition("[")[0] if "::" in name else "/".join(name.split("/")[:3])


def of_patch(patch: Path) -> Change:
    """The change that a patch makes."""
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        core = copy_of_core(Path(folder), patch)
        sources = {str(path.relative_to(core)): path.read_text() for path in core.rglob("*.py")}
    originals = {str(path.relative_to(CORE)): path.read_text() for path in CORE.rglob("*.py")}
    changed = {file: new for file, new in sorted(sources.items()) if originals.get(file) != new}
    return Change.of(patch.stem, True, changed)


def of_mutant(mutant: Mutant) -> Change:
    """The change that a mutant makes."""
    source = mutant.source((CORE / mutant.file).read_text())
    return Change.of(mutant.id, False, {mutant.file: source})


def changed_statements(old: str, new: str) -> set[int]:
    """Lines, from 1, of the statements of `old` that `new` changes, or puts others next to them."""
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


def is_in_functions(source: str, lines: frozenset[int] | set[int]) -> bool:
    """Whether some line is in the body of a function, so that tracing a call sees it."""
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


def changes(seed: int, mutants: int, folder: Path | None = None) -> list[Change]:
    """All patches, and mutants of each room, alternately; of `folder` its patches alone."""
    if folder is not None:
        return [of_patch(patch) for patch in sorted(folder.glob("*.patch"))]
    return [*map(of_patch, BUG_BY_ID.values()), *map(of_mutant, sample(seed, mutants))]


# -- detectors -------------------------------------------------------------------------------------


def traced_cases(server: ForkServer, wanted: Sequence[AnyCase]) -> Iterator[tuple[str, Lines]]:
    """Lines that each case executes on any of its ranks; none of one that fails."""
    with server.workers(WorkerSettings().ranks, prepare=rank.prepare) as workers:
        for case in wanted:
            call = FunctionCall.of(rank.run, (case,))
            merged = Trace()
            try:
                answers = workers.run(executed, call, seconds=_TEST_SECONDS, ranks=case.ranks)
            except WorkersError:
                continue
            for _, lines in answers:
                merged.add(lines)
            yield case.id, merged.lines


def on_cases(server: ForkServer, wanted: Sequence[AnyCase]) -> Detector:
    """Asks cases of `validate`, those on few ranks first. One counts that passes unchanged."""
    by_id = {case.id: case for case in wanted}
    workers = WorkerSettings(case_seconds=_CASE_SECONDS)
    passes: dict[str, bool] = {}

    def passes_without(case: str) -> bool:
        if case not in passes:
            (verdict,) = verdicts(server, [by_id[case]], workers)
            passes[case] = verdict.state == "passed"
        return passes[case]

    def first_failure(core: Path, ids: list[str]) -> dict[str, str]:
        chosen = sorted((by_id[name] for name in ids), key=lambda case: case.ranks)
        with closing(verdicts(server, chosen, workers, core=core)) as judged:
            for verdict in judged:
                if verdict.state == "failed" and passes_without(verdict.case):
                    failure = verdict.failures[0]
                    said = failure.finding.found if failure.finding else ""
                    return {"case": verdict.case, "check": failure.check, "found": said[:160]}
        return {}

    return first_failure


def on_tests() -> Detector:
    """Asks tests of the core. A test counts that fails twice, and passes without the change."""
    passes: dict[str, bool] = {}

    def passes_without(test: str) -> bool:
        if test not in passes:
            with tempfile.TemporaryDirectory(prefix="core-") as name:
                copy_of_core(Path(name))
                passes[test] = _failed_test(_with_tests(Path(name)), [test]) is None
        return passes[test]

    def first_failure(core: Path, ids: list[str]) -> dict[str, str]:
        _with_tests(core)
        while ids:
            failed = _failed_test(core, ids)
            if failed is None:
                return {}
            test, how = failed
            if passes_without(test) and _failed_test(core, [test]) is not None:
                return {"case": test, "check": "test", "found": how[:160]}
            ids = ids[ids.index(test) + 1 if test in ids else len(ids) :]
        return {}

    return first_failure


def _with_tests(core: Path) -> Path:
    """The folder of a core, with all that tests of the core read next to it."""
    for path in (
        "tests/core",
        "tests/conftest.py",
        "tests/optional.py",
        "pyproject.toml",
        "docs",
        "tools",
    ):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (core / path).parent.mkdir(exist_ok=True)
        copy(ROOT / path, core / path)
    return core


def _failed_test(folder: Path, ids: Sequence[str]) -> tuple[str, str] | None:
    """The first test that fails, and how; the first of all where the run ends as a whole."""
    options = ("-q", "-x", "-p", "no:cacheprovider", f"--timeout={stretched(_TEST_SECONDS):.0f}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *ids],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return None
    failure = _FAILED.search(done.stdout)
    if failure:
        return failure[1], failure[2] or ""
    return ids[0], (done.stdout + done.stderr)[-160:]


def executed_by(folder: Path, name: str, trace: Callable[[Path], None]) -> Executed:
    """Lines by id, kept in a file for one state of the core; `trace` writes it."""
    sources = b"".join(path.read_bytes() for path in sorted(CORE.rglob("*.py")))
    file = folder / f"{name}-{hashlib.sha256(sources).hexdigest()[:12]}.jsonl"
    if not file.exists():
        sys.stderr.write(f"tracing {name}\n")
        begun = file.with_suffix(".begun")
        begun.unlink(missing_ok=True)
        trace(begun.absolute())
        begun.rename(file)
    return {entry["id"]: entry["lines"] for entry in map(json.loads, file.read_text().splitlines())}


def _trace_tests(file: Path) -> None:
    plugin = ("-p", "tools.executed_lines", "--executed-lines", str(file))
    options = ("-q", "-p", "no:cacheprovider", "--timeout=600", *_SIDE_BY_SIDE, *plugin)
    subprocess.run([sys.executable, "-m", "pytest", *options, "tests/core"], cwd=ROOT, check=False)


def detector(name: str, folder: Path, server: ForkServer) -> tuple[Detector, Executed]:
    """A detector, and what there is to ask."""
    if name == "tests":
        return on_tests(), executed_by(folder, name, _trace_tests)
    wanted = [
        case
        for case in cases("mfsdp", full=False)
        if isinstance(case, Program) == (name == "programs")
    ]

    def trace(file: Path) -> None:
        with file.open("w") as out:
            for case, lines in traced_cases(server, wanted):
                out.write(json.dumps({"id": case, "lines": lines}) + "\n")

    return on_cases(server, wanted), executed_by(folder, name, trace)


def ask(folder: Path, options: argparse.Namespace) -> None:
    """Every question that has no answer yet, patches before mutants; answers are appended."""
    deadline = time.monotonic() + 60 * options.minutes
    wanted = changes(options.seed, options.mutants, options.patches)
    wanted.sort(key=lambda change: not change.is_patch)
    known = answers(folder)
    with ForkServer(modules=MODULES) as server:
        for name in options.detector:
            left = [change for change in wanted if (change.id, name) not in known]
            if not left or time.monotonic() > deadline:
                continue
            first_failure, lines = detector(name, folder, server)

            def answer(change: Change) -> dict[str, Any] | None:
                """What the detector says of a change; None where the time is up."""
                start = time.monotonic()
                if start > deadline:
                    return None
                ids = change.executing(lines)  # noqa: B023 - called before the next detector
                with change.core() as core:
                    failure = first_failure(core, ids[: options.most]) if ids else {}  # noqa: B023
                outcome = {"outcome": "caught" if failure else "survived", **failure}
                seconds = round(time.monotonic() - start, 1)
                return {"change": change.id, "of": len(ids), **outcome, "seconds": seconds}

            # Tests run in processes of their own, cases on ranks that all changes share.
            with ThreadPoolExecutor(_PROCESSES if name == "tests" else 1) as pool:
                waiting = [pool.submit(answer, change) for change in left]
                for given in filter(None, (future.result() for future in as_completed(waiting))):
                    with (folder / "answers.jsonl").open("a") as out:
                        out.write(json.dumps({"detector": name, **given}) + "\n")
                    said = f"{given['outcome']} ({given['seconds']} s) {given['change']}"
                    sys.stderr.write(f"{name}: {said}\n")


# -- the table -------------------------------------------------------------------------------------


def answers(folder: Path) -> Answers:
    """What is known; of two answers to one question the later."""
    file = folder / "answers.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {(entry["change"], entry["detector"]): entry for entry in map(json.loads, lines)}


def table(known: Answers, wanted: Sequence[Change]) -> str:
    """Who notices what; `-` ran and did not, empty did not run, 0 had nothing to ask.

    Detectors are those of the answers, so that a file of an older tree can be shown as well.
    """
    names = [*dict.fromkeys(name for _, name in known)]
    lines = [_row("change", names), "|---" * (len(names) + 1) + "|"]
    lines += [_row(c.id, [_cell(known.get((c.id, name))) for name in names]) for c in wanted]
    return "\n".join([*summary(known, wanted, names), "", *lines])


def summary(known: Answers, wanted: Sequence[Change], names: Sequence[str]) -> list[str]:
    """Counts: of patches and mutants, what each detector notices, and notices alone."""
    lines = [_row("", ["changes", *names]), "|---" * (len(names) + 2) + "|"]
    for what, is_patch in (("patches", True), ("mutants", False)):
        ids = [change.id for change in wanted if change.is_patch == is_patch]
        complete = [id_ for id_ in ids if all((id_, name) in known for name in names)]
        caught = [{n for n in names if known[id_, n]["outcome"] == "caught"} for id_ in complete]
        counts = [sum(name in by for by in caught) for name in names]
        alone = [sum(by == {name} for by in caught) for name in names]
        nobody = sum(not by for by in caught)
        lines.append(_row(f"{what} noticed", [f"{len(complete)} of {len(ids)}", *counts]))
        lines.append(_row(f"{what} noticed by this one alone", ["", *alone]))
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
