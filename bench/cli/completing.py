"""What a shell completes: sweep files, sweeps of a results folder, their cells and arms.

Nothing is imported before a shell asks, and nothing that a shell asks may fail or print.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def sweep_files(incomplete: str) -> list[str]:
    """Sweeps that come with the tool, and files of the folder that is being typed."""
    from bench.cli.sweep_files import shipped_sweeps

    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    beside = [folder / name for name in _names(folder, "*.yaml")]
    found = [*shipped_sweeps(), *(str(path) for path in beside)]
    return [name for name in found if name.startswith(incomplete)]


def sweeps(incomplete: str) -> list[str]:
    """Sweeps that were run."""
    return [name for name in _sweeps() if name.startswith(incomplete)]


def judged(incomplete: str) -> list[str]:
    """Sweeps that were run, cells of one as SWEEP:CELL, and sweep files."""
    sweep, colon, _ = incomplete.partition(":")
    if colon:
        found = [f"{sweep}:{cell['id']}" for cell in _planned([sweep], "cells")]
        return [name for name in found if name.startswith(incomplete)]
    return [*sweeps(incomplete), *sweep_files(incomplete)]


def cells(incomplete: str) -> list[str]:
    """Cells of the sweeps on the command line."""
    found = dict.fromkeys(str(cell["id"]) for cell in _planned(_asked(), "cells"))
    return [name for name in found if name.startswith(incomplete)]


def arms(incomplete: str) -> list[str]:
    """Arms of the sweeps on the command line."""
    found = dict.fromkeys(str(arm["name"]) for arm in _planned(_asked(), "arms"))
    return [name for name in found if name.startswith(incomplete)]


def metrics(incomplete: str) -> list[str]:
    """What gates judge."""
    from bench.derive.metrics import judged_metrics

    return [name for name in judged_metrics() if name.startswith(incomplete)]


def _words() -> list[str]:
    """The line as it is typed. The parser knows no arguments while an option lacks its value."""
    text = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return text.split()


def _results() -> Path:
    words = _words()
    given = words.index("--results") + 1 if "--results" in words else len(words)
    return Path(words[given] if given < len(words) else "results")


def _sweeps() -> list[str]:
    return _names(_results() / "sweeps", "*")


def _asked() -> list[str]:
    """Sweeps that are named, by a sweep file as well; all where none is."""
    words = _words()
    files = tuple(Path(word).stem for word in words if word.endswith(".yaml"))
    every = _sweeps()
    named = [one for one in every if one in words or (files and one.startswith(files))]
    return named or every


def _planned(names: Sequence[str], what: str) -> list[dict[str, Any]]:
    from bench.store.layout import PLAN
    from bench.store.reading import read_json_object

    plans = [read_json_object(_results() / "sweeps" / name / PLAN, []) for name in names]
    return [one for plan in plans if plan for one in plan.get(what, ())]


def _names(folder: Path, pattern: str) -> list[str]:
    try:
        return sorted(path.name for path in folder.glob(pattern))
    except OSError:
        return []
