"""Saving and loading of model and optimizer, across world sizes, strategies and hybrid modes.

Built on torch.distributed.checkpoint, which can also be used by itself: `model.state_dict()` and
`optimizer.state_dict()` describe their shards (see [Note: analytic chunks]). What is added here:

- a checkpoint is whole or not there (`checkpoint_folder`);
- loading is strict, and nothing is changed before everything has been compared (R18);
- nothing is unpickled without an allow-list (`safe_dcp`), and options are JSON (`plain_values`);
- optimizer state is kept by parameter name, and loaded into an optimizer that has never stepped
  without stepping it (R4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_core.comm.agreement import from_all, from_first, together
from mfsdp_core.comm.rendezvous import agree_on_read
from mfsdp_core.errors import CheckpointError, ConfigurationError, MfsdpError
from mfsdp_core.state import checkpoint_folder as folder
from mfsdp_core.state.loading import Loading
from mfsdp_core.state.named_state import NamedState, add_model, add_optimizer, parameter_names


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
        add_model(state, model)
        if optimizer is not None:
            add_optimizer(state, optimizer, parameter_names(model))
        state.add_values("extra", extra)
        return state

    state = together(group, collect, CheckpointError)
    with _lost_ranks(path):
        partial = from_first(
            group, lambda: folder.begin(path, overwrite=overwrite), CheckpointError
        )
        try:
            _write(partial, state, group)
            own = together(
                group, lambda: folder.digests(partial, group.rank(), group.size()), CheckpointError
            )
            known = {n: d for part in from_all(group, own) for n, d in part.items()}
            from_first(
                group, lambda: folder.commit(partial, path, state.values, known), CheckpointError
            )
        except BaseException:
            if dist.get_rank(group) == 0:
                folder.discard(partial)
            raise


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
    group, path = begin_call("load_checkpoint", model), Path(path)
    together(group, lambda: folder.check_digests(path, group.rank(), group.size()), CheckpointError)
    loading = together(group, lambda: Loading.prepare(path, model, optimizer), CheckpointError)
    with _lost_ranks(path):
        _run_dcp(lambda: loading.read(group), f"{path} could not be read, and is loaded in part")
    loading.install()
    return loading.extra()


def _write(partial: Path, state: NamedState, group: dist.ProcessGroup) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from mfsdp_core.state.safe_dcp import FirstRankPlanner

    _run_dcp(
        lambda: save(
            state.tensors,
            storage_writer=FileSystemWriter(partial),
            planner=FirstRankPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        ),
        "the checkpoint could not be written",
    )


def _run_dcp(call: Callable[[], Any], what: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except CheckpointException as error:
        reasons = [f"rank {r}: {type(e).__name__}: {e}" for r, (e, _) in error.failures.items()]
        raise CheckpointError(f"{what}. {'; '.join(reasons)}") from None


@contextmanager
def _lost_ranks(path: Path) -> Iterator[None]:
    """A collective that fails because a rank is gone becomes an error of this package."""
    try:
        yield
    except MfsdpError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{path}: a rank was lost ({error}).") from error


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
