"""Small named JSON documents of a results folder: baselines and noise calibrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.store import layout
from bench.store.atomic import reporting_failed_writes, write_text_atomically
from bench.store.reading import read_json_object


class NamedDocuments:
    """`<folder>/<name>.json`; a file is replaced as one step, and read tolerantly."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind

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
        if not path.exists():
            return None
        return read_document(path, self.kind)

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
        found = problems[0] if problems else "no such file"
        raise UsageError(f"{path} is no {kind}: {found}; expected a JSON object")
    return document
