"""Small JSON documents of a results folder: baselines, noise calibrations and validations."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import DamagedRecordError, UsageError
from bench.store import layout
from bench.store.atomic import reporting_failed_writes, write_json_atomically, write_text_atomically
from bench.store.reading import read_json_object
from bench.verdict import ValidationRecord


@dataclass(frozen=True)
class NamedDocuments:
    """`<folder>/<name>.json`; a file is replaced as one step, and read tolerantly."""

    folder: Path
    kind: str

    def path(self, name: str) -> Path:
        """Where `name` is, or would be.

        Raises:
            UsageError: the name cannot be a file name.
        """
        return self.folder / f"{layout.checked_identifier(self.kind, name)}.json"

    def write(self, name: str, text: str) -> Path:
        """Keep `text`, which must be JSON, under `name`.

        Raises:
            UsageError: the name cannot be a file name, or the folder may not be written.
            StoreFullError: no space; what was there before still is.
        """
        path = self.path(name)
        with reporting_failed_writes(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
        return path

    def find(self, name: str) -> dict[str, Any] | None:
        """The document `name`, None if there is none.

        Raises:
            UsageError: it is there and cannot be read.
        """
        path = self.path(name)
        return read_document(path, self.kind) if path.exists() else None

    def read(self, name: str) -> dict[str, Any]:
        """The document `name`.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        document = self.find(name)
        if document is None:
            known = ", ".join(self.names()) or "none"
            raise UsageError(f"no {self.kind} {name!r} in {self.folder}; known: {known}")
        return document

    def names(self) -> list[str]:
        """What is there, in alphabetical order."""
        return sorted(file.stem for file in self.folder.glob("*.json"))


def read_document(path: Path, kind: str) -> dict[str, Any]:
    """One JSON object from a file of any place.

    Raises:
        UsageError: missing, or not a JSON object.
    """
    problems: list[str] = []
    document = read_json_object(path, problems)
    if document is None:
        described = problems[0] if problems else "no such file"
        raise UsageError(f"{path} is no {kind}: {described}; expected a JSON object")
    return document


PREFIX = "validation-"
_FILE = "verdict.json"


@dataclass(frozen=True)
class Validations:
    """`validations/<id>/verdict.json`, replaced as one step while it grows."""

    folder: Path

    def new_id(self) -> str:
        """An id that sorts by time."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return f"{PREFIX}{stamp}-{secrets.token_hex(2)}"

    def write(self, record: ValidationRecord) -> Path:
        """Keep `record` under its id.

        Raises:
            StoreFullError: no space; what was there before still is.
            UsageError: the folder may not be written.
        """
        path = self.folder / record.id / _FILE
        with reporting_failed_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, record.model_dump(mode="json"))
        return path

    def ids(self) -> list[str]:
        """Oldest first."""
        return sorted(path.parent.name for path in self.folder.glob(f"{PREFIX}*/{_FILE}"))

    def read(self, wanted: str) -> ValidationRecord:
        """The validation of this id, or the only one whose id contains `wanted`.

        Raises:
            UsageError: none or several match.
            DamagedRecordError: it cannot be read.
        """
        known = self.ids()
        matches = [wanted] if wanted in known else [record for record in known if wanted in record]
        if len(matches) != 1:
            shown = ", ".join(known[-5:]) or "none"
            raise UsageError(
                f"{len(matches)} validations in {self.folder} have {wanted!r} in their id; "
                f"the newest are: {shown}"
            )
        path = self.folder / matches[0] / _FILE
        try:
            return ValidationRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            raise DamagedRecordError(f"{path} cannot be read: {error}") from error

    def newest(self, engine: str | None = None) -> ValidationRecord | None:
        """The newest readable validation (of `engine`)."""
        for id_ in reversed(self.ids()):
            try:
                record = self.read(id_)
            except DamagedRecordError:
                continue
            if engine in (None, *record.engines):
                return record
        return None
