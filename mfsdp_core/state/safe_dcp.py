"""torch.distributed.checkpoint without running code that came with a checkpoint.

torch unpickles `.metadata` and every value that is not a tensor without restriction. These readers
and planners take the former through an allow-list of the classes that metadata consists of, and the
latter with `weights_only=True`. They work with plain `dcp.load` as well:

    dcp.load(state, storage_reader=SafeReader(path), planner=SafeLoadPlanner())
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mfsdp_core.errors import CheckpointError

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    (f"{_DCP}metadata", "BytesStorageMetadata"),
    (f"{_DCP}metadata", "ChunkStorageMetadata"),
    (f"{_DCP}metadata", "Metadata"),
    (f"{_DCP}metadata", "MetadataIndex"),
    (f"{_DCP}metadata", "StorageMeta"),
    (f"{_DCP}metadata", "TensorProperties"),
    (f"{_DCP}metadata", "TensorStorageMetadata"),
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


_NAMES_AS_THEY_ARE = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Write this rank's part of `tensors`, and of what all ranks have the first one's. Collective.

    Raises:
        CheckpointException: a rank could not write.
    """
    writer, planner = FileSystemWriter(folder), FirstRankPlanner(**_NAMES_AS_THEY_ARE)
    save(tensors, storage_writer=writer, planner=planner, process_group=group)


def load_tensors(targets: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Fill `targets`. Collective.

    Raises:
        CheckpointException: a rank could not read.
    """
    reader, planner = SafeReader(folder), SafeLoadPlanner(**_NAMES_AS_THEY_ARE)
    load(targets, storage_reader=reader, planner=planner, process_group=group)


def stored_tensors(folder: Path, files: Collection[str]) -> dict[str, TensorStorageMetadata]:
    """Metadata of every tensor stored in `folder`, by name, in order. files: those it may lie in.

    Raises:
        CheckpointError: metadata that does not belong to this checkpoint.
    """
    metadata = SafeReader(folder).read_metadata()
    used = {info.relative_path for info in metadata.storage_data.values()}
    if not used <= set(files):
        raise CheckpointError(f"{folder}: metadata names files that the manifest does not.")
    stored = {
        name: entry
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    if len(stored) != len(metadata.state_dict_metadata):
        raise CheckpointError(f"{folder} holds pickled values, which are not read.")
    return stored


class SafeReader(FileSystemReader):
    """Reads `.metadata` with an allow-list, and files of the checkpoint's own folder alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata. `rank`: of ranks that were saved without collectives.

        Raises:
            CheckpointError: it asks for anything but the classes that metadata consists of, or
                names a file outside of the folder.
        """
        del args
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as stream:
                metadata = _Unpickler(cast("io.BufferedReader", stream)).load()
        except (FileNotFoundError, CheckpointError):
            raise
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds no metadata but a {type(metadata).__name__}.")
        for info in (metadata.storage_data or {}).values():
            name = info.relative_path
            if "/" in name or name in ("", ".", ".."):
                raise CheckpointError(f"{path} names a file outside of its folder: {name!r}.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Unpickles values that are not tensors with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is not a tensor into the state dict.

        Raises:
            CheckpointError: it needs more than plain data.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} is refused, since loading it could run code: {error}"
            ) from None
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class FirstRankPlanner(DefaultSavePlanner):
    """Saves what is whole on every rank (buffers, counters) as the first rank has it.

    torch takes such values from the rank that has least to write, which is arbitrary where ranks
    differ (running statistics).
    """

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        first, *others = all_plans
        shards = [[i for i in p.items if i.type is WriteItemType.SHARD] for p in others]
        kept = [replace(p, items=own) for p, own in zip(others, shards, strict=True)]
        return dedup_save_plans([first, *kept], self.dedup_save_to_lowest_rank)


def _enum_member(kind: Any, name: Any) -> Enum:
    """What `getattr` stands for in a pickle: Python 3.11.0 to 3.11.3 write members of enums so."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise CheckpointError(
        f"the checkpoint's metadata asks for the attribute {name!r} of {kind!r}, which no metadata "
        "needs: loading it could run code. Do not load this checkpoint."
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"the checkpoint's metadata asks for {module}.{name}, which no metadata needs: loading "
            "it could run code. Do not load this checkpoint."
        )
