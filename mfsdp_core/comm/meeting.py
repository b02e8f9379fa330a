"""Where ranks wait for each other by name, before a collective that they might not share.

[Note: gathering again] Native collectives know no names: two ranks that gather different units, or
one of them a unit once more, get each other's weights. Ranks that leave units out agree all the
same (see [Note: gather order]), and nothing is asked of a unit's first gather in a pass. Before a
further one the ranks meet in the store of their group, under the bucket's name; who is alone there
says so when the group's time is up. Messages from rank to rank carry names, and need no meeting.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mfsdp_core.errors import LifecycleError

_LONGEST_PAUSE_SECONDS = 0.05
#: Meetings of a group in the order in which they are made, the same on all ranks.
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Meetings:
    """Of the ranks of one group; every rank counts how often it has come to each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._number = next(_numbers.setdefault(group, itertools.count()))
        self._times: Counter[str] = Counter()

    def meet(self, name: str, device: torch.device) -> None:
        """Return once every rank has come here as often as this one, for the same `name`.

        Raises:
            LifecycleError: not all have, within the time limit of the group.
        """
        store = distributed_c10d._get_process_group_store(self._group)
        self._times[name] += 1
        key = f"mfsdp/{self._number}/{name}"
        wanted = self._times[name] * self._group.size()
        limit = self._group._get_backend(device).options._timeout.total_seconds()
        end, pause = time.monotonic() + limit, 1e-4
        came = store.add(key, 1)
        while came < wanted:
            if time.monotonic() > end:
                raise LifecycleError(
                    f"{name} is gathered once more in this pass on some ranks only. Some may leave "
                    "out a unit, but all that run it must run it equally often in a pass, and in "
                    "the same order."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            came = store.add(key, 0)
