"""Runs programs on devices without memory, in a process that loads torch behind `library`.

    python programs.py LIBRARY TORCH < NAMES

prints a line for each: its name, its error or null, its traffic, operations of each thread.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path


def main(library: Path, torch: Path, names: list[str]) -> None:
    """Names of `PROGRAMS`."""
    sys.path[:0] = [str(Path(__file__).parents[up]) for up in (3, 2, 1)]
    importlib.import_module("fake_device.library").load(library, torch)
    steps = importlib.import_module("fake_device.steps")
    fake_cuda = importlib.import_module("fake_device.device").FakeCuda
    steps.join_ranks()
    for name in names:
        error, cuda = None, fake_cuda()
        try:
            with cuda:
                steps.PROGRAMS[name]()
        except Exception:
            error = traceback.format_exc(limit=-12)
        outcome = [name, error, cuda.traffic, [*cuda.threads.values()]]
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).parent, json.load(sys.stdin))
