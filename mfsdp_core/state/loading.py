"""One load of a checkpoint: compare everything, read, then install."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import CheckpointError, StateDictError
from mfsdp_core.state.checkpoint_folder import Manifest, read_manifest
from mfsdp_core.state.model_state import PREFIX
from mfsdp_core.state.named_state import (
    MODEL,
    OPTIMIZER,
    VALUES,
    NamedState,
    add_model,
    empty_like_parameter,
    groups_by_name,
    one_row,
    parameter_names,
    shaped_as,
)
from mfsdp_core.state.owner import numbered
from mfsdp_core.state.plain_values import unpack

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from mfsdp_core.state.safe_dcp import SafeReader

Stored = dict[str, "TensorStorageMetadata"]


@dataclass
class Loading:
    """What will be read and where it goes; nothing is changed before `read`."""

    reader: SafeReader
    manifest: Manifest
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    targets: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Loading:
        """Compare the checkpoint at `path` with the model and the optimizer. No communication.

        Raises:
            CheckpointError: not a complete checkpoint that can be trusted.
            StateDictError: it does not fit.
            ConfigurationError: the optimizer is not the model's.
        """
        from mfsdp_core.state.safe_dcp import SafeReader

        manifest = read_manifest(path)
        reader = SafeReader(path)
        loading = cls(reader, manifest, model, optimizer)
        stored = _tensors_of(reader, manifest)
        loading._aim_at_model(stored)
        if optimizer is not None:
            loading._aim_at_optimizer(stored, optimizer)
        loading._aim_at_values(stored)
        return loading

    def read(self, group: dist.ProcessGroup) -> None:
        """Read every target: weights in place, optimizer state into new memory. Collective."""
        from torch.distributed.checkpoint.state_dict_loader import load

        from mfsdp_core.state.safe_dcp import SafeLoadPlanner

        load(
            self.targets,
            storage_reader=self.reader,
            planner=SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )

    def install(self) -> None:
        """Bring what was read into compute weights, modules and the optimizer."""
        state = self.model.state_dict()
        extra = self._values("extra_state")
        state.update({PREFIX + name: value for name, value in extra.items()})
        self.model.load_state_dict(state)
        if self.optimizer is not None:
            self._install_optimizer(self.optimizer)

    def extra(self) -> Any:
        """What the caller had added."""
        return self._values("extra")

    def _aim_at_model(self, stored: Stored) -> None:
        own = NamedState()
        add_model(own, self.model)
        _compare_names("the model", _under(MODEL, own.tensors), _under(MODEL, stored))
        _compare_names(
            "extra state of modules",
            own.values["extra_state"],
            self.manifest.values.get("extra_state", {}),
        )
        for name in _under(MODEL, own.tensors):
            _compare_shapes(name, own.tensors[name].shape, stored[name].size)
            self.targets[name] = own.tensors[name]

    def _aim_at_optimizer(self, stored: Stored, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(self.model)
        own = groups_by_name(optimizer, names)
        if "groups" not in self.manifest.values:
            raise StateDictError(
                "the checkpoint has no optimizer. Load it without one, or save it with one."
            )
        saved = self.manifest.values["groups"]
        if [set(g["names"]) for g in own] != [set(g["names"]) for g in saved]:
            raise StateDictError(
                f"parameter groups differ: the optimizer has {_sizes(own)} parameters per group, "
                f"the checkpoint {_sizes(saved)}, or others. Build the optimizer as it was built."
            )
        parameters = {name: parameter for parameter, name in names.items()}
        for name in _under(OPTIMIZER, stored):
            parameter = parameters.get(_parameter_of(name))
            if parameter is None:
                raise StateDictError(f"{name}: state of a parameter that the model does not have.")
            size, dtype = stored[name].size, stored[name].properties.dtype
            whole = one_row(parameter.detach()).shape
            if size == whole:
                self.targets[name] = one_row(empty_like_parameter(parameter, dtype))
            else:
                self.targets[name] = torch.zeros(size, dtype=dtype)

    def _aim_at_values(self, stored: Stored) -> None:
        for name in _under(VALUES, stored):
            self.targets[name] = torch.zeros(stored[name].size, dtype=stored[name].properties.dtype)

    def _install_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(self.model)
        skeleton = optimizer.state_dict()
        number = {names[p]: packed for packed, p in numbered(optimizer, skeleton)}
        state: dict[int, dict[str, Any]] = {}
        shapes = {name: parameter.shape for parameter, name in names.items()}
        for key in _under(OPTIMIZER, self.targets):
            name = _parameter_of(key)
            value = shaped_as(self.targets[key], shapes[name])
            state.setdefault(number[name], {})[key.rsplit("/", 1)[1]] = value
        for name, values in self._values("plain_state").items():
            state.setdefault(number[name], {}).update(values)
        groups = [
            {**own, **saved["options"], "params": own["params"]}
            for own, saved in zip(skeleton["param_groups"], self._values("groups"), strict=True)
        ]
        optimizer.load_state_dict({**skeleton, "state": state, "param_groups": groups})
        for parameter, name in names.items():
            for key, value in state.get(number.get(name, -1), {}).items():
                # Optimizer.load_state_dict casts moments to the dtype of the weights.
                if isinstance(value, DTensor) and optimizer.state[parameter][key] is not value:
                    optimizer.state[parameter][key] = value

    def _values(self, section: str) -> Any:
        return unpack(self.manifest.values.get(section), self.targets)


def _tensors_of(reader: SafeReader, manifest: Manifest) -> Stored:
    """Metadata of every stored tensor, by name, in order.

    Raises:
        CheckpointError: metadata that does not belong to this checkpoint.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = reader.read_metadata()
    used = {info.relative_path for info in metadata.storage_data.values()}
    if not used <= set(manifest.files):
        raise CheckpointError(f"{reader.path}: metadata names files that the manifest does not.")
    stored = {
        name: entry
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    if len(stored) != len(metadata.state_dict_metadata):
        raise CheckpointError(f"{reader.path} holds pickled values, which are not read.")
    return stored


def _compare_names(what: str, own: Iterable[str], stored: Iterable[str]) -> None:
    own, stored = set(own), set(stored)
    if own != stored:
        raise StateDictError(
            f"the checkpoint does not fit {what}. Missing from the checkpoint: "
            f"{sorted(own - stored) or 'none'}. Unexpected in it: {sorted(stored - own) or 'none'}."
        )


def _compare_shapes(name: str, own: torch.Size, stored: torch.Size) -> None:
    if own != stored:
        raise StateDictError(
            f"{name}: the model has shape {tuple(own)}, the checkpoint {tuple(stored)}."
        )


def _under(prefix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rsplit("/", 1)[0]


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["names"]) for group in groups]
