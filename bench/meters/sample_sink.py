"""Appends one line per step to a rank's sample file; the growing file is also the heartbeat."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.record import StepSample

_FIELDS: Final = tuple(field.name for field in fields(StepSample))


class SampleSink:
    """Writes complete lines only, each handed to the operating system before `append` returns.

    Not forced to disk: that would cost milliseconds per step, and a reader drops a cut-off line.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def append(self, sample: StepSample) -> None:
        """One JSON object on one line."""
        document = {name: getattr(sample, name) for name in _FIELDS}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
