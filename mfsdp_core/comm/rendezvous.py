"""Where ranks agree in the store of their process group before they begin a collective.

[Note: gathering again] Native collectives know no names: two ranks that gather different units, or
one of them a unit once more, get each other's weights. Ranks that leave units out agree all the
same (see [Note: gather order]), and nothing is compared for a unit's first gather in a pass. Before
a further one the ranks wait for each other here. Messages that carry tags, as those of gloo do,
need no such wait.

[Note: named reads] What a user computes from sharded weights may gather them, in the order in which
each rank happens to ask. Before each such gather the ranks say here what they are about to read:
name, shape and dtype. Where they differ, all of them refuse. The store is no part of any group's
communication, so a rank that does something else in the meantime disturbs nothing.

A rendezvous costs a rank four requests to the store, and the last rank to come six more.
Where ranks say different things each rank tells the others what it has said.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from mfsdp_core.errors import LifecycleError, MismatchedReadError

_AS_REGISTERED = "as registered: "
#: Characters of what a rank has said that an error quotes, and ranks that it quotes.
_QUOTED, _QUOTED_RANKS = 600, 8
#: Rendezvous made for a group in the order in which they are made, the same on all ranks.
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
#: Reads of each set of ranks, since torch.distributed was initialised.
_reads: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Rendezvous]] = (
    WeakKeyDictionary()
)


def _time_limit(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Of the group's collectives; torch's default where a backend does not tell it."""
    options = getattr(group._get_backend(device), "options", None)
    limit: timedelta = getattr(options, "_timeout", None) or default_pg_timeout
    return limit


class _Rendezvous:
    """Of some global ranks, again and again."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self._prefix = f"mfsdp/{name}"
        self._ranks = ranks
        self._turn = 0
        self._done: list[str] = []

    def come(self, what: str, group: dist.ProcessGroup, device: torch.device) -> dict[int, str]:
        """Return once every rank has come: what each rank said, or nothing if all said `what`.

        group: it is waited as long as its collectives on `device` would.

        Raises:
            TimeoutError: not all have come within the time limit; says how many have. It is as if
                this rank had not come: a later turn may be the same on all ranks again.
        """
        store = distributed_c10d._get_default_store()
        limit = _time_limit(group, device)
        self._turn += 1
        base = f"{self._prefix}/{self._turn}"
        verdict = f"{base}/verdict"
        said = f"{base}/{hashlib.blake2s(what.encode(), digest_size=16).hexdigest()}"
        store.add(said, 1)
        if store.add(base, 1) == len(self._ranks):
            for key in self._done:  # everybody has read them
                store.delete_key(key)
            alike = store.add(said, 0) == len(self._ranks)
            store.set(verdict, "same" if alike else "different")
        try:
            store.wait([verdict], limit)
        except RuntimeError as error:
            if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
                raise
            others = store.add(base, -1)
            if others < len(self._ranks) - 1:
                store.add(said, -1)
                self._turn -= 1
                seconds = limit.total_seconds()
                came = f"{others + 1} of the ranks {list(self._ranks)} came within {seconds:g} s"
                raise TimeoutError(came) from None
        self._done = [base, said, verdict]
        if bytes(store.get(verdict)) == b"same":
            return {}
        store.set(f"{base}/of/{dist.get_rank()}", what[:_QUOTED])
        quoted = list(self._ranks)[:_QUOTED_RANKS]
        told = {rank: bytes(store.get(f"{base}/of/{rank}")).decode() for rank in quoted}
        # The rank that serves the store may end with the error: not before all have read it.
        if store.add(f"{base}/seen", 1) == len(self._ranks):
            store.set(f"{base}/end", "")
        store.wait([f"{base}/end"], limit)
        return told


def _is_alone(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether no other rank will come: a group of one, or torch's fake one, however it is named."""
    return group.size() == 1 or "Fake" in type(group._get_backend(device)).__name__


class _GroupRendezvous:
    """Of the ranks of one group; keys in the store begin with the name of the class."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        number = next(_numbers.setdefault(group, itertools.count()))
        ranks = dist.get_process_group_ranks(group)
        name = f"{type(self).__name__}/{'-'.join(map(str, ranks[:2]))}/{group.group_name}/{number}"
        self._rendezvous = _Rendezvous(name, ranks)
        self._group = group
        self._device = device


class UnitRendezvous(_GroupRendezvous):
    """Before a unit is gathered once more in a pass."""

    def wait(self, bucket: str) -> None:
        """Return once every rank has come here as often as this one, for the same `bucket`.

        Raises:
            LifecycleError: they have come for different ones, or not all within the time limit.
        """
        if _is_alone(self._group, self._device):
            return
        try:
            said = self._rendezvous.come(bucket, self._group, self._device)
        except TimeoutError as error:
            said, cause = {0: ""}, f" ({error})"
        else:
            cause = "".join(f" Rank {rank} gathers {name}." for rank, name in said.items())
        if said:
            raise LifecycleError(
                f"{bucket} is gathered once more in this pass on some ranks only. Some may leave "
                "out a unit, but all that run it must run it equally often in a pass, and in "
                f"the same order.{cause}"
            )


class OrderAgreement(_GroupRendezvous):
    """Whether all ranks have seen their units run in the same order."""

    #: Passes that are still compared.
    _left = 4

    def is_same(self, order: Sequence[int]) -> bool:
        """Return once every rank has come here as often as this one: whether all have `order`.

        Raises:
            LifecycleError: not all have come within the time limit of the group.
        """
        return not self._others(str(tuple(order)))

    def is_same_pass(self, order: Sequence[int]) -> bool:
        """As `is_same`, of the units that one of the first passes has run.

        Raises:
            LifecycleError: also where ranks differ and units run in another order than registered.
        """
        if _is_alone(self._group, self._device):
            return True
        self._left -= 1
        if self._left < 0:
            return False
        known = _AS_REGISTERED if list(order) == sorted(order) else "in another order: "
        said = self._others(f"{known}{tuple(order)}")
        if any(not one.startswith(_AS_REGISTERED) for one in said.values()):
            raise LifecycleError(
                "units run in another order than they are registered, and before that order was "
                "known ranks have left out different ones: "
                + "; ".join(f"rank {rank} ran units {one}" for rank, one in said.items())
                + ". Run all units on all ranks in the first pass, or name them in the order in "
                "which they run in prefetch_order."
            )
        return not said

    def _others(self, what: str) -> dict[int, str]:
        if _is_alone(self._group, self._device):
            return {}
        try:
            return self._rendezvous.come(what, self._group, self._device)
        except TimeoutError as error:
            raise LifecycleError(
                f"ranks compare the order of their units at the end of a forward pass, or before "
                f"gradients are reduced, and {error}. Expected the same passes of the model on "
                "every rank."
            ) from None


def agree_on_read(
    ranks: Sequence[int], what: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Return once every one of the global `ranks` is about to read `what`.

    See [Note: named reads]. group: whose time limit holds.

    Raises:
        MismatchedReadError: they read different things, or not all came in time.
    """
    if len(ranks) == 1 or dist.get_backend(group) == "fake":
        return
    world = dist.group.WORLD
    assert world is not None
    known = _reads.setdefault(world, {})
    key = tuple(ranks)
    if key not in known:
        digest = hashlib.blake2s(repr(key).encode(), digest_size=8).hexdigest()
        known[key] = _Rendezvous(f"reads/{digest}", key)
    try:
        said = known[key].come(what, group, device)
    except TimeoutError as error:
        raise MismatchedReadError(
            f"rank {dist.get_rank()} reads {what[:_QUOTED]}, which needs the rows of other ranks, "
            f"and only {error}. All ranks read sharded weights together and in the same order."
        ) from None
    if said:
        raise MismatchedReadError(
            "ranks read different sharded tensors at the same time: "
            + "; ".join(f"rank {rank} reads {name}" for rank, name in said.items())
            + ("; ..." if len(said) < len(ranks) else "")
            + ". All ranks read them together and in the same order: walk sorted names, not a set, "
            "and read outside of branches on the rank. For whole weights use export_state_dict or "
            "save_safetensors."
        )
