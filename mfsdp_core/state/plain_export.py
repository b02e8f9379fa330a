"""Whole, unsharded weights: out to the first rank one parameter at a time, and in again.

Names are those of the bare module, each tied parameter under its first name, and shapes are the
parameters' own. Of safetensors files one at a time is held, on the first rank alone; reading takes
from the files only the rows that a rank has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.agreement import from_first, together
from mfsdp_core.errors import CheckpointError
from mfsdp_core.shard.chunk import described_offsets
from mfsdp_core.shard.dtensor import agree_to_read, assemble
from mfsdp_core.state import checkpoint_folder as folder
from mfsdp_core.state.checkpoint import begin_call, new_folder
from mfsdp_core.state.model_state import bare_values
from mfsdp_core.state.named_state import compare_names, compare_shapes

INDEX = "model.safetensors.index.json"
_FILE_BYTES = 5 * 2**30
_HERE = "the files"


@torch.no_grad()
def export_state_dict(model: nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The bare module's state dict on the CPU of the first rank; an empty one on other ranks.

    Collective. One parameter at a time is whole on every rank. dtype: what floating-point weights
    are cast to; None keeps that of the main weights. A tied parameter is there under all its names.
    """
    group = begin_call("export_state_dict", model)
    values, aliases = bare_values(model)
    whole = _gathered(values, dtype, keep=dist.get_rank(group) == 0)
    return whole | {alias: whole[name] for alias, name in aliases.items() if whole}


@torch.no_grad()
def save_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _FILE_BYTES,
    overwrite: bool = False,
) -> None:
    """Write whole weights and buffers to safetensors files in the folder `path`.

    Collective. Above `max_file_bytes` there are several files, and an index of them. The folder
    appears when it is complete. dtype: as for `export_state_dict`. A tied parameter is stored under
    its first name, extra state of modules not at all.

    Raises:
        CheckpointError: safetensors is not installed, `path` exists, or it could not be written.
    """
    group, path = begin_call("save_safetensors", model), Path(path)
    library = together(group, _safetensors)
    tensors, _ = _own_tensors(model)
    files = _split(tensors, dtype, max_file_bytes)
    is_first = dist.get_rank(group) == 0
    with new_folder(group, path, overwrite=overwrite) as unfinished:
        for name, names in files.items():
            part = _gathered({each: tensors[each] for each in names}, dtype, keep=is_first)
            file, save = unfinished / name, library.torch.save_file
            from_first(group, save, part, file, metadata={"format": "pt"})
        from_first(group, _finish, unfinished, path, files)


@torch.no_grad()
def load_safetensors(path: str | Path, model: nn.Module) -> None:
    """Load weights and buffers from a safetensors file, or from a folder of them.

    Collective, to agree on errors; weights are not communicated. Strict: names and shapes must be
    those of the bare module, a tied parameter under any of its names. Values take the dtype of the
    main weights.

    Raises:
        CheckpointError: no such files, damaged ones, or safetensors is not installed.
        StateDictError: names or shapes differ. Nothing was changed.
    """
    group, path = begin_call("load_safetensors", model), Path(path)
    tensors, aliases = _own_tensors(model)

    def compare() -> dict[str, Any]:
        stored = _stored_slices(_safetensors(), path)
        for alias, name in aliases.items():
            found = stored.pop(alias, None)
            stored.update({name: found} if found is not None and name not in stored else {})
        _compare(tensors, stored)
        return stored

    if (path / folder.MANIFEST).is_file():
        together(group, folder.check_digests, path, group.rank(), group.size())
    stored = together(group, compare)
    together(group, _read_all, tensors, stored)
    model.load_state_dict(model.state_dict())


def _own_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    values, aliases = bare_values(model)
    return {n: value for n, value in values.items() if isinstance(value, torch.Tensor)}, aliases


def _gathered(
    values: Mapping[str, Any], dtype: torch.dtype | None, *, keep: bool
) -> dict[str, Any]:
    """Each value whole and on the CPU where `keep`; a collective for every shard."""
    agree_to_read([value for value in values.values() if isinstance(value, DTensor)], "export")
    kept: dict[str, Any] = {}
    for name, value in values.items():
        whole = assemble(value) if isinstance(value, torch.Tensor) else value
        if keep and isinstance(whole, torch.Tensor):
            kept[name] = whole.to("cpu", _stored_dtype(whole, dtype), copy=True).contiguous()
        elif keep:
            kept[name] = whole
    return kept


def _stored_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _split(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, max_file_bytes: int
) -> dict[str, list[str]]:
    """Names by file, in order; a tensor above the limit has a file of its own."""
    parts: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * _stored_dtype(tensor, dtype).itemsize
        if parts[-1] and used + size > max_file_bytes:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {
        f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors": names
        for number, names in enumerate(parts)
    }


def _finish(unfinished: Path, path: Path, files: Mapping[str, list[str]]) -> None:
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        total = sum((unfinished / file).stat().st_size for file in files)
        document = {"metadata": {"total_size": total}, "weight_map": places}
        (unfinished / INDEX).write_text(json.dumps(document, indent=1), encoding="utf-8")
    folder.commit(unfinished, path, {}, folder.digests(unfinished, 0, 1))


def _stored_slices(library: ModuleType, path: Path) -> dict[str, Any]:
    """Every tensor of the files at `path`, by name, as something that reads parts of it.

    Raises:
        CheckpointError: no files, a damaged one, or a name in two of them.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path}: expected a .safetensors file or a folder of them.")
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        lost = set(index["weight_map"].values()) - {file.name for file in files}
        if lost:
            raise CheckpointError(f"{path}: the index names files that are not there: {lost}.")
    slices: dict[str, Any] = {}
    for file in files:
        reader = library.safe_open(file, framework="pt")
        for name in reader.keys():  # noqa: SIM118 - not a mapping
            if name in slices:
                raise CheckpointError(f"{path}: {name} is in two files.")
            slices[name] = _Slice(reader, name, tuple(reader.get_slice(name).get_shape()))
    return slices


@dataclass(frozen=True)
class _Slice:
    """A tensor in an open safetensors file."""

    reader: Any
    name: str
    shape: tuple[int, ...]

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """The box of `sizes` at `offsets`."""
        values: torch.Tensor
        if self.shape:
            box = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
            values = self.reader.get_slice(self.name)[box]
        else:
            values = self.reader.get_tensor(self.name)
            values = values.view(1)[: sizes[0]] if sizes else values
        return values


def _compare(own: Mapping[str, torch.Tensor], stored: Mapping[str, _Slice]) -> None:
    compare_names(_HERE, "the model", own, stored)
    for name, value in own.items():
        found = stored[name].shape
        # A sharded scalar is a row to its shard, and a scalar to everybody else.
        compare_shapes(_HERE, name, value.shape, found or ((1,) if value.shape == (1,) else ()))


def _read_all(own: Mapping[str, torch.Tensor], stored: Mapping[str, _Slice]) -> None:
    for name, value in own.items():
        offsets = described_offsets(value) if isinstance(value, DTensor) else None
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel():
            start = offsets if offsets is not None else (0,) * local.ndim
            local.copy_(stored[name].part(start, tuple(local.shape)))


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "safetensors files need the package safetensors, which is not installed "
            "(the extra `safetensors` of this project has it)."
        ) from error
    return safetensors
