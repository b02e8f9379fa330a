"""Saving and loading of model and optimizer, across world sizes, strategies and hybrid modes.

Built on torch.distributed.checkpoint, which can also be used by itself: `model.state_dict()` and
`optimizer.state_dict()` describe their shards (see [Note: analytic chunks]). What is added here:

- a checkpoint is whole or not there (`checkpoint_folder`);
- loading is strict, and nothing is changed before everything has been compared (R18);
- nothing is unpickled without an allow-list (`safe_dcp`), and options are JSON (`named_state`);
- optimizer state is kept by parameter name, and loaded into an optimizer that has never stepped
  without stepping it (R4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.agreement import from_all, from_first, together
from mfsdp_core.comm.rendezvous import agree_on_read
from mfsdp_core.errors import CheckpointError, ConfigurationError, MfsdpError, StateDictError
from mfsdp_core.shard.chunk import describe_like
from mfsdp_core.state import checkpoint_folder as folder
from mfsdp_core.state.model_state import PREFIX
from mfsdp_core.state.named_state import (
    MODEL,
    OPTIMIZER,
    VALUES,
    NamedState,
    compare_names,
    compare_shapes,
    groups_by_name,
    one_row,
    parameter_names,
    shaped_as,
    unpack,
)
from mfsdp_core.state.optimizer_parameters import numbered

_HERE = "the checkpoint"


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: object = None,
    overwrite: bool = False,
) -> None:
    """Write model, optimizer and `extra` to the folder `path`, which then is complete.

    Collective over all ranks of the model, which must see one file system. extra: numbers, strings,
    None, whole tensors, and lists, tuples and dicts of them; the first rank's counts, as for
    buffers. overwrite: replace an existing checkpoint, once the new one is complete. Gradients are
    not saved: call it between `optimizer.step()` and the next forward pass.

    Raises:
        CheckpointError: it could not be written (a full disk, a lost rank), `path` exists, or a
            value cannot be stored. What was at `path` before is still there.
        ConfigurationError: the model is not sharded by this package, or the optimizer not its.
    """
    group, path = begin_call("save_checkpoint", model), Path(path)

    def collect() -> NamedState:
        state = NamedState()
        state.add_model(model)
        if optimizer is not None:
            state.add_optimizer(optimizer, parameter_names(model))
        state.add_values("extra", extra)
        return state

    state = together(group, collect)
    explained = _explained(path, "the checkpoint could not be written")
    with explained, new_folder(group, path, overwrite=overwrite) as unfinished:
        from mfsdp_core.state.safe_dcp import save_tensors

        save_tensors(state.tensors, unfinished, group)
        own = together(group, folder.digests, unfinished, group.rank(), group.size())
        known = {n: d for part in from_all(group, own) for n, d in part.items()}
        from_first(group, folder.commit, unfinished, path, state.values, known)


@torch.no_grad()
def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Load what `save_checkpoint` wrote, whatever the model was sharded like; returns `extra`.

    Collective over all ranks of the model. Values take the dtype of the weights they are loaded
    into. Without `optimizer` its saved state is left alone.

    Raises:
        CheckpointError: no complete checkpoint, a damaged one, or one that asks to run code.
        StateDictError: names, shapes or parameter groups differ. Nothing was changed.
        ConfigurationError: the model is not sharded by this package, or the optimizer not its.
    """
    from mfsdp_core.state.safe_dcp import load_tensors

    group, path = begin_call("load_checkpoint", model), Path(path)
    together(group, folder.check_digests, path, group.rank(), group.size())
    targets, values = together(group, _aim, path, model, optimizer)
    with _explained(path, f"{path} could not be read, and is loaded in part"):
        load_tensors(targets, path, group)
    state = model.state_dict()
    extra = unpack(values.get("extra_state"), targets)
    model.load_state_dict(state | {PREFIX + name: value for name, value in extra.items()})
    if optimizer is not None:
        _install(optimizer, parameter_names(model), targets, values)
    return unpack(values.get("extra"), targets)


def _aim(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What is read and where it goes, and the further values; nothing is changed yet.

    Raises:
        CheckpointError: not a complete checkpoint that can be trusted.
        StateDictError: it does not fit.
        ConfigurationError: the optimizer is not the model's.
    """
    from mfsdp_core.state.safe_dcp import stored_tensors

    manifest = folder.read_manifest(path)
    stored, own = stored_tensors(path, manifest.files), NamedState()
    own.add_model(model)
    targets = {name: own.tensors[name] for name in _under(MODEL, own.tensors)}
    compare_names(_HERE, "the model", targets, _under(MODEL, stored))
    extra = manifest.values.get("extra_state", {})
    compare_names(_HERE, "extra state of modules", own.values["extra_state"], extra)
    for name, value in targets.items():
        compare_shapes(_HERE, name, value.shape, stored[name].size)
    if optimizer is not None:
        names = parameter_names(model)
        _compare_groups(groups_by_name(optimizer, names), manifest.values.get("groups"))
        parameters = {name: parameter for parameter, name in names.items()}
        for name in _under(OPTIMIZER, stored):
            targets[name] = _state_to_be(name, stored[name], parameters)
    for name in _under(VALUES, stored):
        targets[name] = torch.zeros(stored[name].size, dtype=stored[name].properties.dtype)
    return targets, manifest.values


def _compare_groups(own: list[dict[str, Any]], saved: list[dict[str, Any]] | None) -> None:
    if saved is None:
        raise StateDictError(
            "the checkpoint has no optimizer. Load it without one, or save it with one."
        )
    if [set(group["names"]) for group in own] != [set(group["names"]) for group in saved]:
        sizes = [[len(group["names"]) for group in groups] for groups in (own, saved)]
        raise StateDictError(
            f"parameter groups differ: the optimizer has {sizes[0]} parameters per group, the "
            f"checkpoint {sizes[1]}, or others. Build the optimizer as it was built."
        )


def _state_to_be(name: str, entry: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """New memory for one entry of optimizer state: sharded as its parameter, or as it was."""
    parameter = parameters.get(_parameter_of(name))
    if parameter is None:
        raise StateDictError(f"{name}: state of a parameter that the model does not have.")
    size, dtype = entry.size, entry.properties.dtype
    if size != one_row(parameter.detach()).shape:
        return torch.zeros(size, dtype=dtype)
    empty = torch.zeros_like(parameter.detach(), dtype=dtype)
    describe_like(empty, parameter)
    return one_row(empty)


def _install(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    targets: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
) -> None:
    skeleton = optimizer.state_dict()
    number = {names[p]: packed for packed, p in numbered(optimizer, skeleton)}
    state: dict[int, dict[str, Any]] = {}
    shapes = {name: parameter.shape for parameter, name in names.items()}
    for key in _under(OPTIMIZER, targets):
        name = _parameter_of(key)
        value = shaped_as(targets[key], shapes[name])
        state.setdefault(number[name], {})[key.rsplit("/", 1)[1]] = value
    for name, plain in unpack(values.get("plain_state"), targets).items():
        state.setdefault(number[name], {}).update(plain)
    saved = unpack(values.get("groups"), targets)
    groups = [
        {**own, **group["options"], "params": own["params"]}
        for own, group in zip(skeleton["param_groups"], saved, strict=True)
    ]
    optimizer.load_state_dict({**skeleton, "state": state, "param_groups": groups})
    for parameter, name in names.items():
        for key, value in state.get(number.get(name, -1), {}).items():
            # Optimizer.load_state_dict casts moments to the dtype of the weights.
            if isinstance(value, DTensor) and optimizer.state[parameter][key] is not value:
                optimizer.state[parameter][key] = value


def _under(prefix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rsplit("/", 1)[0]


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Errors of torch.distributed.checkpoint, or of a collective, become one that says whose.

    what: of the former, what the matter is.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except MfsdpError:
        raise
    except CheckpointException as error:
        reasons = [f"rank {r}: {type(e).__name__}: {e}" for r, (e, _) in error.failures.items()]
        raise CheckpointError(f"{what}. {'; '.join(reasons)}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{path}: a rank was lost ({error}).") from error


@contextmanager
def new_folder(group: dist.ProcessGroup, path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder next to `path` to write into, which goes where that fails. Collective.

    Raises:
        CheckpointError: `path` is there already, and not to be replaced.
    """
    unfinished = from_first(group, folder.begin, path, overwrite=overwrite)
    try:
        yield unfinished
    except BaseException:
        if dist.get_rank(group) == 0:
            folder.discard(unfinished)
        raise


def begin_call(name: str, model: nn.Module) -> dist.ProcessGroup:
    """All ranks that hold a part of `model`, once each of them is about to call `name`.

    Raises:
        ConfigurationError: it is not sharded by this package, or in a way that cannot be saved.
        MismatchedReadError: the ranks are about to do different things, see [Note: named reads].
    """
    group = getattr(model, "checkpoint_group", None)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"{name}: expected a model that fully_shard_model has returned, found "
            f"{type(model).__name__}."
        )
    device = next(model.parameters()).device
    ranks = dist.get_process_group_ranks(group)
    agree_on_read(ranks, f"{name}()", group, device)
    return group
