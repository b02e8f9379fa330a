"""Reading one run back, whatever state its files are in.

Damage never raises: it becomes a sentence in `RunRecord.problems`, and what is intact is used. The
one exception is `spec.json`, without which nothing says what was measured.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import DamagedRecordError, first_problem
from bench.record import (
    FINISHED_GOOD,
    SCHEMA_VERSION,
    RunOutline,
    RunRecord,
    RunStatus,
    shortened,
)
from bench.spec import ResolvedRun
from bench.store import layout
from bench.store.digest import DIGEST, changed_files
from bench.store.file_lock import holder_of, is_locked
from bench.store.samples import read_samples

# Longer than a rank may be silent before its launcher ends it (hang_seconds and the start), and
# than a network file system may show its files late.
_SILENT_SECONDS = 360.0


def read_record(path: Path, run_id: str) -> RunRecord:
    """Read the run in folder `path`.

    Raises:
        DamagedRecordError: `spec.json` is missing or cannot be understood.
    """
    resolved = read_spec(path)
    problems: list[str] = []
    document = read_json_object(path / layout.STATUS, problems)
    status = _status(path, document, problems)
    changed = _changed(path, document or {})
    problems += changed
    environment = read_json_object(path / layout.ENVIRONMENT, problems)
    if environment is None:
        problems.append(f"{layout.ENVIRONMENT} is missing")
        environment = {}
    environment["runtime"] = read_json_object(path / layout.RUNTIME, problems) or {}
    steps, ranks = read_samples(path, problems), range(resolved.launch.ranks)
    if steps:
        steps = {rank: [] for rank in ranks} | steps
    missing = [rank for rank in ranks if not steps.get(rank)]
    if status.state == "ok" and missing:
        problems.append(f"no samples of rank {shortened(missing)}")
    return RunRecord(
        run_id=run_id,
        resolved=resolved,
        status=status,
        environment=environment,
        steps=steps,
        memory=read_json_object(path / layout.MEMORY, problems),
        counts=read_json_object(path / layout.COUNTS, problems),
        problems=tuple(problems),
        changed=tuple(changed),
    )


def read_outline(path: Path, run_id: str) -> RunOutline:
    """As `read_record`, without samples where the digest shows that they are what they were.

    A run that ends well has a sample of every rank and step (`bench.launch.run`), so a
    digest that fits says as much as reading them does.

    Raises:
        DamagedRecordError: as `read_record`.
    """
    document = read_json_object(path / layout.STATUS, []) or {}
    if document.get("state") in FINISHED_GOOD and document.get(DIGEST) is not None:
        problems: list[str] = []
        status = _status(path, document, problems)
        if not problems and not _changed(path, document):
            return RunOutline(run_id, read_spec(path), status)
    record = read_record(path, run_id)
    return RunOutline(run_id, record.resolved, record.status, record.damage)


def _changed(path: Path, document: dict[str, Any]) -> list[str]:
    """What was changed since the end of the run, in words; a run that goes on has no digest yet."""
    if not document or (document.get("ended_utc") is None and document.get(DIGEST, ...) is None):
        return []
    return changed_files(path / layout.STATUS, document, "after the run had ended")


def read_spec(path: Path) -> ResolvedRun:
    """`spec.json` of the run in folder `path`.

    Raises:
        DamagedRecordError: it is missing or cannot be understood.
    """
    file = path / layout.SPEC
    try:
        document = json.loads(file.read_bytes())
        return ResolvedRun.model_validate(document)
    except OSError as error:
        raise DamagedRecordError(f"{file}: {error.strerror}") from error
    except RecursionError as error:
        raise DamagedRecordError(f"{file} cannot be understood: nested too deep") from error
    except ValidationError as error:
        raise DamagedRecordError(f"{file} cannot be understood: {first_problem(error)}") from error
    except ValueError as error:
        raise DamagedRecordError(f"{file} is not valid JSON: {error}") from error


def read_status(path: Path, problems: list[str]) -> RunStatus:
    """`status.json`; a run that says it is running but has no living owner was interrupted."""
    return _status(path, read_json_object(path / layout.STATUS, problems), problems)


def _status(path: Path, document: dict[str, Any] | None, problems: list[str]) -> RunStatus:
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
    """`status` as it stands while the owner lives, else interrupted ([Note: liveness by flock]).

    Locks of another machine may not show here: its owner lives while its files change.
    """
    if is_locked(path / layout.OWNER_LOCK) or _lives_elsewhere(path):
        return status
    return status.model_copy(
        update={
            "state": "interrupted",
            "reason": status.reason
            or "the process that ran it ended without writing how (killed, or power loss)",
        }
    )


def _lives_elsewhere(path: Path) -> bool:
    host = holder_of(path / layout.OWNER_LOCK).partition(" on ")[2]
    if host in {"", socket.gethostname()}:
        return False
    try:
        newest = max(file.stat().st_mtime for file in [path, *path.iterdir()])
    except OSError:
        return False
    return time.time() - newest < _SILENT_SECONDS


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
