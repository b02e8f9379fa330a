"""Appends one line per step to the sample file of a node, which is also the heartbeat."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Self

from bench.record import StepSample


class SetupBeat:
    """Touches a sample file, which it makes, at most once a second: a rank at set-up is alive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._latest_seconds = -math.inf

    def __call__(self) -> None:
        """Once for every chunk of work."""
        now = time.monotonic()
        if now - self._latest_seconds >= 1.0:
            self._latest_seconds = now
            self._path.touch()


class SampleSink:
    """Hands each line to the operating system whole, before `append` returns.

    Other ranks of the node append to the same file ([Note: one writer per line]). Not forced to
    disk: that would cost milliseconds per step, and a reader drops a cut-off line.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)

    def append(self, sample: StepSample) -> None:
        """One JSON object on one line; the number of the rank comes first."""
        document = {"rank": self._rank} | sample.values()
        line = (json.dumps(document) + "\n").encode()
        while line:  # a full disk takes a part, and refuses the rest
            line = line[os.write(self._descriptor, line) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
