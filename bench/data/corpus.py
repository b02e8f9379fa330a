"""Bytes of real files, in an order that does not depend on the file system.

Without a path: the `.py` sources of the standard library of the running interpreter, so that a
fresh machine has real text without a download. Test folders are left out, because some systems
do not ship them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.errors import UsageError

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# A corpus is read into memory by every rank; more text than this adds nothing to a benchmark run.
MAX_CORPUS_BYTES = 256 * 2**20


def read_corpus(path: Path | None) -> NDArray[np.uint8]:
    """`corpus_bytes` as an array. Raises UsageError where there is nothing to read."""
    corpus = np.frombuffer(corpus_bytes(path), dtype=np.uint8)
    if corpus.size == 0:
        raise UsageError(
            f"data.path: expected text, found no bytes in {path or 'the standard library'}; "
            "name a file or folder with text in it, or use data.kind: markov"
        )
    return corpus


def corpus_bytes(path: Path | None) -> bytes:
    """All bytes of a file, of a folder's files by sorted relative path, or of the standard library.

    Hidden files are skipped. Reading stops after MAX_CORPUS_BYTES. Raises UsageError where a file
    cannot be read.
    """
    pieces: list[bytes] = []
    room = MAX_CORPUS_BYTES
    for file in _files(path):
        try:
            with file.open("rb") as opened:
                pieces.append(opened.read(room))
        except OSError as error:
            raise UsageError(
                f"data.path: expected readable files, found {file}: {error.strerror}; "
                "make it readable or name another file or folder"
            ) from error
        room -= len(pieces[-1])
        if room <= 0:
            break
    return b"".join(pieces)


def _files(path: Path | None) -> Iterator[Path]:
    if path is None:
        yield from _standard_library()
    elif path.is_file():
        yield path
    elif path.is_dir():
        yield from _sorted_files(path)
    else:
        raise UsageError(
            f"data.path: expected a file or folder, found nothing at {path}; "
            "correct the path, or leave it out to train on the standard library's sources"
        )


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _sorted_files(root, ".py", skipped=_SKIPPED_FOLDERS)


def _sorted_files(
    root: Path, ending: str = "", *, skipped: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Visible files by relative path; folders that are hidden or `skipped` are not looked into."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(".") or name in skipped)]
        visible = (name for name in files if name.endswith(ending) and not name.startswith("."))
        found += [file for file in map(Path(folder).joinpath, visible) if file.is_file()]
    yield from sorted(found, key=Path.as_posix)
