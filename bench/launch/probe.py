"""Asks an arm's interpreter, before any run, what its ranks would import and can understand.

It may be of an older commit, which lacks settings and engines. spec.json is what two versions agree
on. A setting that came later can be left out of it as long as it has its default, which is how the
older code behaves; with any other value the older code cannot run the cell.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.errors import UsageError
from bench.launch.code import OWN_PACKAGES, RankCode
from bench.launch.command import python_path
from bench.launch.environment import PACKAGES
from bench.record import SCHEMA_VERSION
from bench.spec import ResolvedRun, known_engine
from bench.spec.engine_table import TABLE

# What a rank cannot start without.
_NEEDED = (*OWN_PACKAGES, "torch", "pydantic", "psutil", "numpy")
_TIMEOUT_SECONDS = 120.0
_ABSENT = object()


def probe(
    code: RankCode,
    *,
    cells: Mapping[str, ResolvedRun],
    packages: Iterable[str],
    distributions: Iterable[str],
) -> dict[str, Any]:
    """The answer of `rank_entry/mfsdp_bench_rank.py --probe`, with nothing wrong in it.

    Args:
        code: where the ranks of the arm would find their code.
        cells: what they would run.
        packages: packages of another repository.
        distributions: what was installed for the arm.

    Raises:
        UsageError: the interpreter cannot run ranks, or is of another record format.
    """
    patterns = dict.fromkeys(OWN_PACKAGES, ()) | {name: [f"{name}/**/*.py"] for name in packages}
    questions = {
        "arm": code.arm,
        "needed": _NEEDED,
        "versions": PACKAGES,
        "specs": {cell: resolved.model_dump_json() for cell, resolved in cells.items()},
        "packages": {name: {"patterns": every} for name, every in patterns.items()},
        "distributions": list(distributions),
    }
    answer, who = _ask(code, questions), f"arm {code.arm}"
    if answer["missing"]:
        raise UsageError(
            f"{who}: {code.python} has no {', '.join(answer['missing'])}; install what"
            " `pyproject.toml` lists there, add packages:NAME to the arm, or name another"
            " interpreter"
        )
    if answer["error"] is not None:
        raise UsageError(f"{who}: its bench cannot be imported: {answer['error'][:300]}")
    if answer["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{who}: its bench writes records of schema {answer['schema_version']}, this one reads"
            f" schema {SCHEMA_VERSION}; choose a commit with the same schema, or run the sweep in"
            " each checkout and compare the reports"
        )
    return answer


def _ask(code: RankCode, questions: dict[str, Any]) -> dict[str, Any]:
    variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": python_path(code, os.environ)}
    try:
        done = subprocess.run(
            [code.python, "-m", "mfsdp_bench_rank", "--probe"],
            input=json.dumps(questions),
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"arm {code.arm}: {code.python} cannot be used as a Python interpreter ({error})"
        ) from error
    if not answer:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(
            f"arm {code.arm}: {code.python} cannot run the code of the ranks ({last[:300]});"
            " expected Python 3.11 or later"
        )
    return answer


def unknown_settings(
    unreadable: Mapping[str, Sequence[Sequence[Any]]], cells: Mapping[str, ResolvedRun], who: str
) -> frozenset[tuple[str, ...]]:
    """The settings to leave out of spec.json for an arm, each by its path.

    Args:
        unreadable: cell -> what the arm's `bench` says about its spec, as (place, kind, message).
        cells: the specs.
        who: begins the message of an error.

    Raises:
        UsageError: the arm cannot run a cell as meant.
    """
    unknown: set[tuple[str, ...]] = set()
    for cell, problems in unreadable.items():
        for place, kind, message in problems:
            path = tuple(str(part) for part in place)
            value = _value(cells[cell].model_dump(), path)
            changed = _value(cells[cell].model_dump(exclude_defaults=True), path) is not _ABSENT
            if kind != "extra_forbidden" or changed or value is _ABSENT:
                shown = "" if value is _ABSENT else f" = {value!r}"[:80]
                raise UsageError(
                    f"{who}: its bench cannot run cell {cell}: {'.'.join(path)}{shown}: {message};"
                    " choose a later commit, or leave the cell out with --skip"
                )
            unknown.add(path)
    return frozenset(unknown)


def _value(document: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        document = document.get(part, _ABSENT) if isinstance(document, dict) else _ABSENT
    return document


def check_engines(code: RankCode, cells: Mapping[str, ResolvedRun]) -> None:
    """Refuse a checkout without the engine of a cell, whose settings it takes for somebody's own.

    Raises:
        UsageError: engines of this repository that came later.
    """
    for cell, resolved in cells.items():
        row = known_engine(resolved.engine.name)
        module = row.factory.partition(":")[0].replace(".", "/")
        if row in TABLE and not (code.root / f"{module}.py").is_file():
            raise UsageError(
                f"arm {code.arm}: its bench has no engine {row.name}, which cell {cell} needs;"
                " choose a later commit, or leave the cell out with --skip"
            )
