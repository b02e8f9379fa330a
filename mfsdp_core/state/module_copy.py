"""Copies of a sharded module, such as `torch.optim.swa_utils.AveragedModel(model.module)` makes.

`copy.deepcopy` of a sharded module, or of one of its units, gives a module with shards of its own,
placed as the model's are, on which averages of weights work without communication. It does not
compute: the hooks that it shares with the model refuse its call. To evaluate an average, load it
into a sharded model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import offsets_of

_OVERRIDDEN = ("__deepcopy__", "__reduce_ex__")


def allow_copies(modules: Iterable[nn.Module]) -> None:
    """Let `copy.deepcopy` copy the units and the root of a sharded model, and refuse pickling."""
    for module in modules:
        module.__deepcopy__ = partial(_copy_module, module)  # type: ignore[assignment]
        module.__reduce_ex__ = refuse_pickling  # type: ignore[method-assign]


def refuse_pickling(*_arguments: object) -> NoReturn:
    """What pickle meets in a sharded model.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError(
        "a sharded model cannot be pickled: a rank holds a part of it, and its hooks belong to "
        "this process. Save model.state_dict() with torch.distributed.checkpoint."
    )


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy over shards of its own.

    Raises:
        LifecycleError: the module is running.
    """
    for name, parameter in module.named_parameters():
        if offsets_of(parameter) is None:
            raise LifecycleError(
                f"{name} is gathered now: a module cannot be copied while it runs. Copy it between "
                "steps."
            )
    overrides = {name: vars(module).pop(name) for name in _OVERRIDDEN if name in vars(module)}
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    finally:
        vars(module).update(overrides)
    return copied
