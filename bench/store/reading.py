"""Reading one run back, whatever state its files are in.

Damage never raises: it becomes a sentence in `RunRecord.problems`, and what is intact is used. The
one exception is `spec.json`, without which nothing says what was measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.record import SCHEMA_VERSION, RunRecord, RunStatus, StepSample, shortened
from bench.spec import ResolvedRun
from bench.store import layout
from bench.store.digest import broken_seals
from bench.store.errors import DamagedRecordError
from bench.store.file_lock import is_locked
from bench.store.samples import read_samples
from bench.store.upgrade import upgraded_spec


def read_record(path: Path, run_id: str) -> RunRecord:
    """Read the run in folder `path`.

    Raises:
        DamagedRecordError: `spec.json` is missing or cannot be understood.
    """
    resolved = read_spec(path)
    problems: list[str] = []
    status = read_status(path, problems)
    problems += broken_seals(path, read_json_object(path / layout.STATUS, []) or {})
    environment = read_json_object(path / layout.ENVIRONMENT, problems)
    if environment is None:
        problems.append(f"{layout.ENVIRONMENT} is missing")
        environment = {}
    if "runtime" not in environment:
        environment["runtime"] = read_json_object(path / layout.RUNTIME, problems) or {}
    return RunRecord(
        run_id=run_id,
        resolved=resolved,
        status=status,
        environment=environment,
        steps=_read_steps(path, resolved, status, problems),
        memory=read_json_object(path / layout.MEMORY, problems),
        checkpoints=read_json_object(path / layout.CHECKPOINTS, problems),
        problems=tuple(problems),
    )


def read_spec(path: Path) -> ResolvedRun:
    """`spec.json` of the run in folder `path`.

    Raises:
        DamagedRecordError: it is missing or cannot be understood.
    """
    file = path / layout.SPEC
    try:
        document = json.loads(file.read_bytes())
        return ResolvedRun.model_validate(upgraded_spec(document))
    except OSError as error:
        raise DamagedRecordError(f"{file}: {error.strerror}") from error
    except RecursionError as error:
        raise DamagedRecordError(f"{file} cannot be understood: nested too deep") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DamagedRecordError(
            f"{file} cannot be understood: {key + ': ' if key else ''}{first['msg']}"
        ) from error
    except ValueError as error:
        raise DamagedRecordError(f"{file} is not valid JSON: {error}") from error


def read_status(path: Path, problems: list[str]) -> RunStatus:
    """`status.json`; a run that says it is running but has no living owner was interrupted."""
    document = read_json_object(path / layout.STATUS, problems)
    if document is None:
        problems.append(f"{layout.STATUS} is missing or damaged")
        return _ownerless(path, RunStatus())
    try:
        status = RunStatus.model_validate(document)
    except ValidationError as error:
        problems.append(f"{layout.STATUS}: {error.errors()[0]['msg']}")
        return _ownerless(path, RunStatus())
    if status.schema_version > SCHEMA_VERSION:
        problems.append(
            f"{layout.STATUS} was written by a newer version (schema {status.schema_version})"
        )
    return _ownerless(path, status) if status.state == "running" else status


def _ownerless(path: Path, status: RunStatus) -> RunStatus:
    """`status` as it stands while the owner lives, else interrupted ([Note: liveness by flock])."""
    if is_locked(path / layout.OWNER_LOCK):
        return status
    return status.model_copy(
        update={
            "state": "interrupted",
            "reason": status.reason
            or "the process that ran it ended without writing how (killed, or power loss)",
        }
    )


def read_failures(path: Path, problems: list[str]) -> dict[int, dict[str, Any]]:
    """`failure.rank<N>.json` of every rank that left a readable one."""
    failures: dict[int, dict[str, Any]] = {}
    for file in sorted(path.glob(layout.FAILURE_GLOB)):
        rank = layout.rank_of(file)
        document = read_json_object(file, problems)
        if rank is not None and document is not None:
            failures[rank] = document
    return failures


def read_json_object(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The JSON object in `file`; None if it is absent, or damaged (then `problems` grows)."""
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{file.name}: {error.strerror}")
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"{file.name} is not valid JSON: {error}")
        return None
    if not isinstance(document, dict):
        problems.append(f"{file.name}: expected a JSON object, found {type(document).__name__}")
        return None
    return document


def _read_steps(
    path: Path, resolved: ResolvedRun, status: RunStatus, problems: list[str]
) -> dict[int, list[StepSample]]:
    steps = read_samples(path, problems)
    if steps:
        steps = {rank: [] for rank in range(resolved.launch.ranks)} | steps
    if status.state == "ok":
        missing = [rank for rank in range(resolved.launch.ranks) if not steps.get(rank)]
        if missing:
            problems.append(f"no samples of rank {shortened(missing)}")
    return steps
