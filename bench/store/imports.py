"""Runs of other frameworks in a results folder, never among measured ones.

imports/<name>/workload.json   workload and provenance
steps.jsonl       one `ImportedStep` per line
nccl.log          lines of NCCL that stood among them, for `mfsdp-bench nccl`
import.lock       of who writes the others
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench.errors import DamagedRecordError, UsageError
from bench.store.atomic import reporting_failed_writes, write_json_atomically, write_text_atomically
from bench.store.digest import changed_files, with_digest
from bench.store.file_lock import FileLock
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload

_WORKLOAD = "workload.json"
_STEPS = "steps.jsonl"
_NCCL = "nccl.log"
_LOCK = "import.lock"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_STEP: TypeAdapter[ImportedStep] = TypeAdapter(ImportedStep)


@dataclasses.dataclass(frozen=True)
class Imports:
    """All imported runs of a results folder."""

    folder: Path

    def write(self, run: ImportedRun) -> ImportedRun:
        """Keep a run; nothing happens where it was imported before.

        Raises:
            UsageError: the provenance says that it was measured here; the name is none, or that of
                a run of another log; the folder may not be written, or another command is at it.
            StoreFullError: no space; nothing that was there before is touched.
        """
        name, kind = run.id, run.provenance.kind
        if kind != "imported":
            raise UsageError(
                f"provenance.kind: expected imported, found {kind}; a run that is"
                " measured here gets its record from its launch"
            )
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--name: expected letters, digits, dots, dashes and underscores, found {name!r}"
            )
        folder = self.folder / name
        with reporting_failed_writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK)
        if not lock.acquire():
            raise UsageError(f"another command is writing {folder}; wait for it, and import again")
        try:
            return self._write(run, folder)
        finally:
            lock.release()

    def _write(self, run: ImportedRun, folder: Path) -> ImportedRun:
        name = run.id
        if name in self.ids():
            before = self.read(name)
            if _identity(before) == _identity(run):
                return before
            same = before.provenance.sha256 == run.provenance.sha256
            raise UsageError(
                f"{name} is already the name of an import, of {before.provenance.source}"
                f"{', whose numbers this version reads otherwise' if same else ''}; choose"
                f" another with --name, or delete {folder}"
            )
        write_text_atomically(folder / _STEPS, _text(run.steps))
        shown = "".join(f"{line}\n" for line in run.nccl)
        if shown:
            write_text_atomically(folder / _NCCL, shown)
        else:  # what another log left that was never imported to its end
            (folder / _NCCL).unlink(missing_ok=True)
        # Last: a run without it was never finished, and is not listed.
        document: dict[str, Any] = {
            "workload": run.workload.model_dump(mode="json"),
            "provenance": run.provenance.model_dump(mode="json"),
        }
        write_json_atomically(folder / _WORKLOAD, with_digest(folder / _WORKLOAD, document))
        return run

    def ids(self) -> list[str]:
        """In alphabetical order."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{_WORKLOAD}"))

    def read(self, wanted: str) -> ImportedRun:
        """The imported run of this id.

        Raises:
            UsageError: there is none.
            DamagedRecordError: it cannot be understood, or was changed after it was imported.
        """
        if wanted not in self.ids():
            known = ", ".join(self.ids()) or "none"
            raise UsageError(f"no imported run {wanted!r} in {self.folder}; there are: {known}")
        folder = self.folder / wanted
        remedy = "delete that folder, and import its log again"
        try:
            document = json.loads((folder / _WORKLOAD).read_text(encoding="utf-8"))
            text = (folder / _STEPS).read_text(encoding="utf-8")
            steps = tuple(map(_step, text.splitlines()))
            workload = Workload.model_validate(document["workload"])
            provenance = Provenance.model_validate(document["provenance"])
            log = folder / _NCCL
            nccl = log.read_bytes().decode() if log.is_file() else ""
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise DamagedRecordError(f"{folder} cannot be understood: {error}; {remedy}") from error
        for problem in changed_files(folder / _WORKLOAD, document, "after it was imported"):
            raise DamagedRecordError(f"{folder}/{problem}; {remedy}")
        return ImportedRun(wanted, workload, provenance, steps, tuple(nccl.split("\n")[:-1]))

    def all(self, damaged: list[str] | None = None) -> Iterator[ImportedRun]:
        """Every readable one; why others had to be left out is added to `damaged`."""
        for id_ in self.ids():
            try:
                yield self.read(id_)
            except DamagedRecordError as error:
                if damaged is not None:
                    damaged.append(str(error))


def _identity(run: ImportedRun) -> tuple[object, ...]:
    origin = run.provenance
    return run.workload, _text(run.steps), origin.sha256, origin.label, origin.lines


def _text(steps: Iterable[ImportedStep]) -> str:
    """Lines of JSON, where NaN and infinity are words."""
    plain = (dataclasses.asdict(step) for step in steps)
    written = (_as_words(step) | {"extra": _as_words(step["extra"])} for step in plain)
    return "".join(f"{json.dumps(step, allow_nan=False)}\n" for step in written)


def _as_words(values: Mapping[str, Any]) -> dict[str, Any]:
    is_odd = {name: isinstance(v, float) and not math.isfinite(v) for name, v in values.items()}
    return {name: str(value) if is_odd[name] else value for name, value in values.items()}


def _step(line: str) -> ImportedStep:
    step = _STEP.validate_json(line)
    words: dict[str, float | str]
    words = {name: float(v) for name, v in step.extra.items() if v in ("nan", "inf", "-inf")}
    return dataclasses.replace(step, extra=step.extra | words)
