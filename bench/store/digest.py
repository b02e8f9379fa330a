"""The digest of a finished folder: a hash of each of its files, kept in the one written last.

Raw evidence is never edited. A file that was changed after the end, removed or added makes the run
damaged: it is measured again, and no report counts its numbers. Of NCCL's logs the size alone is
kept, since they may have gigabytes. What is derived, and torch's own traces, may be made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.store.layout import NCCL, SUMMARY, TRACE

DIGEST = "digest"
_HEX_DIGITS = 32
_COVERED = (".json", ".jsonl", ".log")
_FREE = (".", SUMMARY, TRACE)


def with_digest(keeper: Path, document: dict[str, Any]) -> dict[str, Any]:
    """`document`, to be written to `keeper`, with the digest of it and of the other files there."""
    return document | {DIGEST: dict(_hashes(keeper, document))}


def changed_files(keeper: Path, document: dict[str, Any], since: str) -> list[str]:
    """What was changed since the digest was made, in words that end in `since`."""
    kept = document.get(DIGEST)
    if not isinstance(kept, dict):
        return [f"{keeper.name} has lost its digest {since}"]
    hashes = dict(_hashes(keeper, document))
    what = {
        name: "removed" if name not in hashes else "changed" if name in kept else "added"
        for name in sorted({*kept, *hashes})
        if kept.get(name) != hashes.get(name)
    }
    return [f"{name} was {how} {since}" for name, how in what.items()]


def _hashes(keeper: Path, document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rest = {name: value for name, value in document.items() if name != DIGEST}
    yield keeper.name, _hash(json.dumps(rest, sort_keys=True).encode())
    for file in sorted(keeper.parent.iterdir()):
        if file.name.endswith(_COVERED) and not file.name.startswith((*_FREE, keeper.name)):
            yield file.name, _content(file)
    for log in sorted((keeper.parent / NCCL).glob("*")):
        yield f"{NCCL}/{log.name}", f"{log.stat().st_size} bytes"


def _content(file: Path) -> str:
    try:
        return _hash(file.read_bytes())
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_HEX_DIGITS]
