"""The audit of a run of ours: its logs, its marks between iterations, and its groups."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.nccl.audit import Audit, Groups, audit_sources
from reports.nccl.source import find_sources

FOLDER = "nccl"


@dataclass(frozen=True)
class RunAudit:
    """`audit` of a run, or None and in words why there is none."""

    audit: Audit | None
    text: str = ""


def audit_run(run: Path) -> RunAudit:
    """Audit the run in folder `run`; derived from its logs whenever it is asked for."""
    spec = _object(run / "spec.json")
    device = _at(spec, "launch", "device")
    if device == "cpu":
        return RunAudit(
            None,
            "there is no NCCL in this run: its ranks are CPU processes and communicate by gloo",
        )
    folder = run / FOLDER
    logs = sorted(folder.glob("rank*.log"))
    if not logs:
        if _at(spec, "measure", "nccl") == "evidence":
            return RunAudit(None, "the run was to keep NCCL logs but has none: NCCL wrote nothing")
        return RunAudit(
            None, "the run kept no NCCL logs; measure.nccl: evidence makes a run that does"
        )
    sources, remarks = find_sources(list(logs))
    ranks = {source.name: _rank(Path(source.name)) for source in sources}
    boundaries = {
        source.name: _boundaries(folder / f"iterations.rank{ranks[source.name]}.jsonl")
        for source in sources
    }
    boundaries = {name: marks for name, marks in boundaries.items() if marks}
    groups = Groups(ranks, _roles(folder))
    audit = audit_sources(
        sources, remarks, boundaries=boundaries or None, groups=groups, processes=1
    )
    return RunAudit(audit)


def _rank(path: Path) -> int:
    digits = path.stem.removeprefix("rank")
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def _boundaries(path: Path) -> tuple[tuple[int, int], ...]:
    """(offset in the NCCL log, iterations ended) as the rank noted them; damaged lines are left."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    for line in lines:
        try:
            mark = json.loads(line)
            found.append((int(mark["offset_bytes"]), int(mark["iteration"])))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(sorted(found))


def _roles(folder: Path) -> tuple[tuple[str, frozenset[int]], ...]:
    """Groups that any rank recorded."""
    found: set[tuple[str, frozenset[int]]] = set()
    for path in sorted(folder.glob("groups.rank*.json")):
        groups = _object(path).get("groups", [])
        for group in groups if isinstance(groups, list) else []:
            try:
                found.add((str(group["role"]), frozenset(map(int, group["ranks"]))))
            except (KeyError, TypeError, ValueError):
                continue
    return tuple(sorted(found, key=lambda one: (one[0], sorted(one[1]))))


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _at(document: dict[str, Any], section: str, key: str) -> Any:
    part = document.get(section)
    return part.get(key) if isinstance(part, dict) else None
