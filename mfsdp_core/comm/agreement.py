"""Steps that all ranks finish, or that fail on all ranks with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from mfsdp_core.errors import CheckpointError, MfsdpError

T = TypeVar("T")
P = ParamSpec("P")


def together(
    group: dist.ProcessGroup, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `step` on every rank of `group`; its result on this rank.

    Collective. Where a rank raises, every rank raises: an error of this package unchanged, another
    `Exception` as a `CheckpointError` that names the rank.
    """
    result, error = _attempt(dist.get_rank(group), step, *args, **kwargs)
    _raise_first(from_all(group, error))
    return result  # type: ignore[return-value] # without an error there is a result


def from_all(group: dist.ProcessGroup, value: T) -> list[T]:
    """`value` of every rank of `group`, in its order. Collective; values can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(
    group: dist.ProcessGroup, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `step` on the first rank of `group`; its result, which can be pickled, on every rank.

    Collective. Raises on every rank, as `together` does.
    """
    outcome: list[Any] = [(None, None)]
    if dist.get_rank(group) == 0:
        outcome = [_attempt(0, step, *args, **kwargs)]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    result, error = outcome[0]
    _raise_first([error])
    return result  # type: ignore[no-any-return] # what the step of the first rank returned


def _attempt(
    rank: int, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T | None, MfsdpError | None]:
    try:
        return step(*args, **kwargs), None
    except MfsdpError as error:
        return None, type(error)(*error.args)
    except Exception as error:
        return None, CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


def _raise_first(errors: list[MfsdpError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
