"""The drop-in functions. Their flat arguments become `Options` here, and go no further."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn

from mfsdp_core.plan.options import Options
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.state.optimizer import check_replaceable, prepare_optimizer, replace_parameters
from mfsdp_core.state.whole_matrices import refuse_unserved
from mfsdp_core.wrapper import MegatronFSDP

P = ParamSpec("P")
R = TypeVar("R")


class _Flat(Protocol[P]):
    """What a type checker sees of `_flat`: the arguments of `Options` in its place."""

    @overload
    def __call__(
        self, front: Callable[[nn.Module, Options], R], /
    ) -> Callable[Concatenate[nn.Module, P], R]: ...

    @overload
    def __call__(
        self, front: Callable[[nn.Module, torch.optim.Optimizer, Options], R], /
    ) -> Callable[Concatenate[nn.Module, torch.optim.Optimizer, P], R]: ...


#: Arguments that upstream no longer has, and what says the same.
_NOW: Final = {
    "preserve_fp32_weights": "MixedPrecisionPolicy(main_params_dtype=torch.float32), or None",
    "grad_reduce_in_fp32": "MixedPrecisionPolicy(main_grads_dtype=torch.float32, "
    "grad_comm_dtype=torch.float32)",
}


def _flat(options: Callable[P, Options]) -> _Flat[P]:
    """A front whose last argument is `Options`, with the arguments of `options` in its place."""
    policy = MixedPrecisionPolicy()
    arguments = [
        argument.replace(default=policy) if argument.name == "mixed_precision_policy" else argument
        for argument in inspect.signature(options).parameters.values()
    ]

    def made(front: Callable[..., R]) -> Callable[..., R]:
        *own, _ = inspect.signature(front, eval_str=True).parameters.values()
        signature = inspect.Signature([*own, *arguments])

        @functools.wraps(front)
        def flat(*args: Any, **kwargs: Any) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                now = "".join(f". {old} is now {_NOW[old]}" for old in _NOW if old in kwargs)
                raise TypeError(f"{front.__name__}() {error}{now}") from None
            first = (given.pop(argument.name) for argument in own)
            return front(*first, options(**given))  # type: ignore[call-arg]  # bound above

        flat.__signature__ = signature  # type: ignore[attr-defined]
        flat.__doc__ = f"{front.__doc__}\n    Arguments:\n{options.__doc__}"
        return flat

    return made


@_flat(Options)
def fully_shard_model(module: nn.Module, options: Options) -> MegatronFSDP:
    """Shard `module` in place over a data-parallel mesh and wrap it.

    Collective: every rank of the mesh calls it with an equal module. Equal weights are the caller's
    business, as under upstream (seed all ranks alike, or call `broadcast_params`); others are
    warned of.

    Raises:
        ConfigurationError: an argument that cannot mean anything.
        CapabilityNotBuiltError: an argument whose capability this version lacks.
    """
    return MegatronFSDP(module, options)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    *,
    whole_matrices: bool | None = None,
) -> torch.optim.Optimizer:
    """Make an optimizer over sharded parameters finish gradients and refresh weights around a step.

    whole_matrices: step on whole tensors, each on one rank; None is for torch's Muon and Adafactor.
    See `mfsdp_core.state.optimizer.prepare_optimizer`. Returns the same optimizer.
    """
    del preproc_state_dict_for_dcp_ckpt  # both values describe shards; see README, Checkpoints
    return prepare_optimizer(optimizer, whole_matrices=whole_matrices)


@_flat(Options)
def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """`fully_shard_model` and `fully_shard_optimizer` in one call.

    The optimizer was built over `module`'s parameters and has not stepped; its parameter groups and
    their options are kept.

    Raises:
        ConfigurationError: as the two functions, or an optimizer with state or foreign parameters.
    """
    check_replaceable(optimizer, module.parameters())
    refuse_unserved(optimizer)
    model = MegatronFSDP(module, options)
    replace_parameters(optimizer, model.sharded_by_original())
    return model, prepare_optimizer(optimizer)
