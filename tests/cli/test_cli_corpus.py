"""What every verb that reads answers with --json, as `corpus/` has kept it.

`REWRITE_CORPUS=1 python -m pytest tests/cli/test_cli_corpus.py` writes `corpus/` anew, and
`git diff` then shows every field that has changed. A file holds the commands of one scenario: the
exit code and the document of each, and what stands in the tables and pages that it wrote.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outcome_scenarios import World, ask, both, does, play, recorded
from recorded_runs import CELLS, Arm, fill_quickstart
from test_cli_outcomes import ROWS, scenarios_of

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
VERBS = (
    *("plan", "fit", "validate", "gate", "compare", "report", "nccl", "import", "export"),
    *("baseline", "status", "schema"),
)
"""`doctor` answers of the machine alone."""
LEFT_OUT = ("--budget", "--arm", "fit sweep.yaml", "noise")
"""Of a scenario with such a command nothing is kept: a clock decides, or it takes seconds."""

MASKS = (
    (re.compile(r"\d{8}T\d{6}(?:\.\d{3})?Z-[0-9a-f]{4}"), "STAMP"),
    (
        re.compile(
            r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:[\d.]+)?( ?UTC|Z|[+-]\d\d:\d\d)?( to [-\d: ]*\d)?"
        ),
        "TIME",
    ),
    (re.compile(r"20\d\d-\d\d-\d\d"), "DATE"),
    (re.compile(r" with uncommitted changes \([0-9a-f]+\)"), ""),
    (re.compile(r"(?<=commit )[0-9a-f]{7,64}\b"), "HASH"),
    (re.compile(r"\b(?=[0-9]*[a-f])[0-9a-f]{7,64}\b"), "HASH"),
    (re.compile(r"-[0-9a-f]{8}\b"), "-HASH"),
)
"""Of every text: when it was, and which code, settings and files it was."""
MACHINE = {
    *("hostname", "cpu_name", "cpu_count", "memory_bytes", "torch", "python", "environment"),
    "temporaries",  # of an optimizer's step: once in some ten runs twice the bytes, cause unknown
}
"""Keys whose value is of the machine, of its packages or of the moment: "MASKED"."""

LOGS = (ROOT / "tests" / "run" / "logs" / "public").glob("*.[ljm]*")
FOLDERS: dict[tuple[str, str], list[Any]] = {
    ("report", "the quickstart"): [
        does(lambda world: fill_quickstart(world.store)),
        *map(ask, ("report quickstart", "report --format pr", "status", "status quickstart")),
        *map(ask, ("export quickstart", "compare ddp-fp32 mfsdp-optim-fp32")),
        ask("baseline save main quickstart"),
    ],
    ("report", "arms that differ"): [
        both(Arm(slower=1.1, more_memory=1.05, loss_shift=1e-4, cpu_noise=0.1), cells=CELLS),
        ask("gate gate", code=1),
        *map(ask, ("compare gate", "report gate", "report --format pr", "export gate")),
        ask("status gate"),
    ],
    ("gate", "two sweeps of other machines and code"): [
        recorded("before", Arm(code="code-0"), cells=CELLS),
        recorded("after", Arm(slower=0.9, more_bytes=1.01), cells=CELLS),
        ask("gate after --against before", code=1),
        ask("compare before after"),
        ask("report"),
    ],
    ("nccl", "every log of its own corpus"): [
        ask(f"nccl {shlex.quote(str(path))}")
        for path in sorted((ROOT / "tests" / "nccl" / "corpus").iterdir())
        if path.suffix != ".tsv"
    ],
    ("import", "every log that people published"): [
        *(ask(f"import {shlex.quote(str(path))}") for path in sorted(LOGS)),
        ask("import"),
        ask("report"),
    ],
    ("schema", "of a sweep file"): [ask("schema")],
}


def cases() -> dict[tuple[str, str], list[Any]]:
    table = {
        (verb, outcome): scenarios_of(verb)[outcome] for verb, outcome in ROWS if verb in VERBS
    }
    return {
        case: steps
        for case, steps in (table | FOLDERS).items()
        if not any(word in getattr(step, "line", "") for step in steps for word in LEFT_OUT)
    }


CASES = cases()


def path_of(case: tuple[str, str]) -> Path:
    verb, outcome = case
    return CORPUS / f"{verb}-{re.sub(r'[^a-z0-9]+', '-', outcome.lower()).strip('-')}.json"


def masked(value: Any, folder: str, key: str = "") -> Any:
    if key in MACHINE and value is not None:
        return "MASKED"
    if isinstance(value, dict):
        return {name: masked(one, folder, name) for name, one in value.items()}
    if isinstance(value, list):
        return [masked(one, folder, key) for one in value]
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, str):
        for path, word in ((folder, "FOLDER"), (sys.executable, "PYTHON"), (str(ROOT), "ROOT")):
            value = value.replace(path, word)
        for pattern, word in MASKS:
            value = pattern.sub(word, value)
    return value


def written(document: Any, folder: Path) -> dict[str, list[str]]:
    """Lines of the pages that an answer names; of tables the names of the columns and two rows."""
    found = {}
    for name in re.findall(r'"([^"]+\.(?:md|csv))"', json.dumps(document)):
        path = folder / name
        if path.is_file():
            lines = path.read_text().splitlines()
            found[path.name] = lines if path.suffix == ".md" else [*lines[:2], *lines[-1:]]
    return found


def answers(world: World, steps: list[Any]) -> list[Any]:
    """Play a scenario: what each of its commands that read answered."""
    found = []
    run = world._run

    def noted(*words: object) -> tuple[int, str, str]:
        code, out, err = run(*words)
        if words[0] in VERBS and "--json" in words:
            line = " ".join(str(word) for word in words if word != "--json")
            document = json.loads(out)
            files = written(document, world.folder)
            found.append({"line": line, "code": code, "answer": document} | files)
        return code, out, err

    world._run, world.as_json = noted, True
    for step in steps:
        step(world)
    return [masked(one, str(world.folder)) for one in found]


def lines_of(value: Any, indent: str = "") -> str:
    """JSON with every value that fits into 110 columns in one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + len(indent) <= 110 or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {lines_of(one, inner)}" for name, one in value.items()]
    else:
        parts = [lines_of(one, inner) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{last}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in pairs:
            yield from leaves(
                one, f"{path}.{name}" if isinstance(value, dict) else f"{path}[{name}]"
            )
    else:
        yield path, value


def changes(kept: Any, found: Any) -> list[str]:
    before, after = dict(leaves(kept)), dict(leaves(found))
    return [
        f"{path}: {before.get(path, 'absent')!r} -> {after.get(path, 'absent')!r}"
        for path in before | after
        if path not in before or path not in after or before[path] != after[path]
    ]


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_the_answer_is_the_one_that_is_kept(world: World, case: tuple[str, str]) -> None:
    found = json.loads(json.dumps(answers(world, CASES[case])))
    path = path_of(case)
    if os.environ.get("REWRITE_CORPUS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines_of(found) + "\n")
    kept = json.loads(path.read_text())
    differing = changes(kept, found)
    assert differing == [], f"{path.name}; REWRITE_CORPUS=1 keeps it:\n" + "\n".join(differing[:40])


def test_every_file_of_the_corpus_has_its_case() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {path_of(case).name for case in CASES}


def not_kept() -> list[Any]:
    """A row of each verb that ends well, one that does not, and every exit code; others nightly."""
    seen: set[tuple[str, bool] | int] = set()
    found = []
    for row, code in ROWS.items():
        kinds = {(row[0], code == 0), code}
        marks = [pytest.mark.nightly] if kinds <= seen else []
        seen |= kinds
        if row not in CASES:
            found.append(pytest.param(row, id=": ".join(row), marks=marks))
    return found


@pytest.mark.parametrize("row", not_kept())
def test_every_command_of_a_row_prints_one_json_document_alone(
    world: World, row: tuple[str, str]
) -> None:
    world.as_json = True
    assert play(world, scenarios_of(row[0])[row[1]]) == ROWS[row], world.err
