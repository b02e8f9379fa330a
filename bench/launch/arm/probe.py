"""Asks an arm's interpreter, before any run, what its ranks would import and can understand."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from bench.errors import UsageError
from bench.launch.code import CORE_PATTERNS, RANK_PATTERNS, RankCode, torch_patterns
from bench.launch.command import python_path
from bench.launch.environment import PACKAGES
from bench.record import SCHEMA_VERSION
from bench.spec import ResolvedRun, engine_names

# What a rank cannot start without.
_NEEDED = ("bench", "mfsdp_core", "torch", "pydantic", "psutil", "numpy")
_TIMEOUT_SECONDS = 120.0


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
    asked = {
        "arm": code.arm,
        "needed": _NEEDED,
        "versions": PACKAGES,
        "specs": {cell: resolved.model_dump_json() for cell, resolved in cells.items()},
        "packages": {
            "bench": {"patterns": RANK_PATTERNS},
            "mfsdp_core": {"patterns": CORE_PATTERNS},
            **{name: {"patterns": [f"{name}/**/*.py"]} for name in packages},
            **{f"torch@{e}": {"patterns": torch_patterns(e)} for e in engine_names()},
        },
        "distributions": list(distributions),
    }
    answer = _ask(code, asked)
    _check(code, answer)
    return answer


def _ask(code: RankCode, asked: dict[str, Any]) -> dict[str, Any]:
    variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": python_path(code, os.environ)}
    try:
        done = subprocess.run(
            [code.python, "-m", "mfsdp_bench_rank", "--probe"],
            input=json.dumps(asked),
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


def _check(code: RankCode, answer: Mapping[str, Any]) -> None:
    who = f"arm {code.arm}"
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
