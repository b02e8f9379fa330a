"""A checkpoint on disk: whole, or not there.

    NAME/                        appears by one rename, when every rank has finished
        manifest.json            written last: format, size and digest of files, values as JSON
        .metadata, __0_0.distcp  torch.distributed.checkpoint's own
    .NAME.partial-0f3a91c2/      where it is written; what a killed process leaves, never read
    .NAME.replaced-0f3a91c2/     the previous checkpoint of that name, until the new one is in place

All ranks must see the folder (a shared file system). Functions that change it run on one rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfsdp_core.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "mfsdp_core checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint consists of.

    files: name -> bytes. digests: name -> SHA-256; older checkpoints have none.
    values: JSON, by section.
    """

    files: dict[str, int]
    digests: dict[str, str]
    values: dict[str, Any]


def begin(path: Path, *, overwrite: bool) -> Path:
    """A new folder to write into, next to `path`. Leftovers of killed processes are removed.

    Raises:
        CheckpointError: something is at `path` and `overwrite` is False, or it is no checkpoint.
    """
    if path.exists():
        if not overwrite:
            raise CheckpointError(
                f"{path} exists. Choose another name, or pass overwrite=True to replace it."
            )
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"{path} exists and is no checkpoint of this package, so it is not replaced. "
                "Remove it, or choose another name."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.partial-*"):
        shutil.rmtree(leftover)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def digests(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """SHA-256 of this rank's share of the files in `folder`, the manifest left out."""
    names = sorted(file.name for file in folder.iterdir() if file.name != MANIFEST)
    return {name: _digest(folder / name) for name in names[rank::ranks]}


def check_digests(path: Path, rank: int, ranks: int) -> None:
    """Compare this rank's share of the files of the checkpoint at `path` with its manifest.

    Raises:
        CheckpointError: a file has other contents than were written, or see `read_manifest`.
    """
    known = read_manifest(path).digests
    for name in sorted(known)[rank::ranks]:
        found = _digest(path / name)
        if found != known[name]:
            raise CheckpointError(
                f"{path / name}: expected contents with SHA-256 {known[name][:16]}..., found "
                f"{found[:16]}...: the file has changed since it was written. Load another one."
            )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def commit(partial: Path, path: Path, values: dict[str, Any], known: Mapping[str, str]) -> None:
    """Make what is in `partial` the checkpoint `path`. known: digests of its files."""
    files = {file.name: file.stat().st_size for file in partial.iterdir()}
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "files": dict(sorted(files.items())),
        "sha256": dict(sorted(known.items())),
        "values": values,
    }
    with (partial / MANIFEST).open("x", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(partial)
    replaced = path.with_name(f".{path.name}.replaced-{secrets.token_hex(4)}")
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def discard(partial: Path) -> None:
    """Remove a folder that will not become a checkpoint, as far as possible."""
    shutil.rmtree(partial, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, whose files are there in full.

    Raises:
        CheckpointError: no checkpoint, one that was never finished, of another format, or one whose
            files are missing or have other sizes.
    """
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(_why_missing(path)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}.") from None
    try:
        if (document["format"], document["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{path}: expected {FORMAT!r} version {FORMAT_VERSION}, found "
                f"{document['format']!r} version {document['version']!r}."
            )
        known = dict(document.get("sha256", {}))
        manifest = Manifest(dict(document["files"]), known, dict(document["values"]))
        whole = {name for name, digest in known.items() if isinstance(digest, str)}
        if "sha256" in document and whole != manifest.files.keys():
            differ = ", ".join(sorted(whole ^ manifest.files.keys()))
            raise CheckpointError(
                f"{path / MANIFEST} is damaged: expected one SHA-256 for each of its files, found "
                f"none, or one of no file, for {differ}. Load another checkpoint."
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error!r}.") from None
    for name, size in manifest.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise CheckpointError(
                f"{file}: expected {size} bytes, found {'no file' if found is None else found}. "
                "The checkpoint is damaged; load another one."
            )
    return manifest


def _why_missing(path: Path) -> str:
    if path.is_dir():
        return (
            f"{path} has no {MANIFEST}: it was not written by save_checkpoint, or never finished. "
            "Load another checkpoint; one of torch's own is read by torch.distributed.checkpoint."
        )
    kept = sorted(path.parent.glob(f".{path.name}.replaced-*"))
    hint = f" The one that was being replaced is complete: {kept[-1]}." if kept else ""
    return f"{path}: no checkpoint there.{hint}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
