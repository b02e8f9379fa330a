"""A copy of mfsdp_core with changes in it: how a bug is put back without a branch for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from bench.errors import BenchError
from bench.validate.bugs import Change

CORE = Path(__file__).parents[2] / "mfsdp_core"


class StaleChangeError(BenchError):
    """A change no longer fits the source: its text is not there, or there several times."""


def copy_of_core(folder: Path, changes: Iterable[Change]) -> Path:
    """Copy mfsdp_core into `folder` (which exists), apply `changes`, and return the copy.

    Raises:
        StaleChangeError: the table of bugs has to follow the source.
    """
    target = folder / CORE.name
    shutil.copytree(CORE, target, ignore=shutil.ignore_patterns("__pycache__"))
    apply(target, changes)
    return target


def apply(core: Path, changes: Iterable[Change]) -> None:
    """Apply `changes`, in order, to the copy of mfsdp_core at `core`.

    Raises:
        StaleChangeError: as `copy_of_core`.
    """
    for change in changes:
        source = core / change.file
        text = source.read_text() if source.is_file() else ""
        if text.count(change.old) != 1:
            raise StaleChangeError(
                f"{change.file}: expected once, found {text.count(change.old)} times: "
                f"{change.old!r}. Write the change anew in bench/validate/bugs.py."
            )
        source.write_text(text.replace(change.old, change.new))
