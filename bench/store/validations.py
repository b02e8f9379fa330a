"""Validations on disk: `validations/<id>/verdict.json`, replaced as one step while it grows."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from bench.errors import DamagedRecordError, UsageError
from bench.store.atomic import reporting_failed_writes, write_json_atomically
from bench.verdict import ValidationRecord

PREFIX = "validation-"
_FILE = "verdict.json"


class Validations:
    """All validations of a results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        matches = [wanted] if wanted in known else [one for one in known if wanted in one]
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
        for one in reversed(self.ids()):
            try:
                record = self.read(one)
            except DamagedRecordError:
                continue
            if engine in (None, *record.engines):
                return record
        return None
