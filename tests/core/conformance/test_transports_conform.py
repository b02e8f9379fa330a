"""What travels between ranks by every transport, beside what each rank works out for itself.

Numbers are small integers, so that sums and means of four are exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.judging import refuses, same
from conformance.small_model import pair
from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.rendezvous import UnitRendezvous
from mfsdp_core.comm.symmetric import user_buffers
from mfsdp_core.comm.torch_backend import Communicator
from mfsdp_core.comm.uneven import gather_rows, row_counts
from mfsdp_core.comm.usage import Usage, unused_by_all
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.dtype_policy import is_wider
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.streams import Streams

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(4)]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
#: Elements of a slice: fewer than ranks, odd, and many.
_SLICES = (1, 7, 65_539)
_CPU = torch.device("cpu")


def _drawn(rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-8, 9, (elements,), generator=generator).to(dtype)


class _Ends:
    """A communicator of a kind over a group, and what it tells and holds."""

    def __init__(self, kind: str, group: Any) -> None:
        self.kind, self.group = kind, group
        self.ledger, self.events, streams = MemoryLedger(), EventBus(), Streams(_CPU)
        self.told: list[Event] = []
        self.events.subscribe(self.told.append, kinds=("collective",))
        common = (group, "role", self.events, streams)
        made = Allocators(AllocationConfig(), [], streams=streams, ledger=self.ledger)
        self.made: Communicator = Communicator(*common)
        direct = PointToPointCommunicator(*common, made.scratch)
        if kind == "auto":
            self.made = Communicator(*common, direct)
        elif kind == "point_to_point":
            self.made = direct
        self.ranks = dist.get_process_group_ranks(group)

    def all_parts(self, number: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """What every rank of the group has drawn."""
        return [_drawn(rank, number, elements, dtype) for rank in self.ranks]


def test_collectives_are_sums_means_and_copies() -> None:
    """Of every dtype and size, several under way, waited for in reverse; and as they are told."""
    rank = dist.get_rank()
    groups = [dist.new_group([2 * half, 2 * half + 1]) for half in (0, 1)]
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())]
    for kind in ("native", "auto", "point_to_point"):
        for group in (dist.group.WORLD, groups[rank // 2], alone[rank]):
            ends = _Ends(kind, group)
            size = group.size()
            same("place", (ends.made.size, ends.made.rank), (size, ends.ranks.index(rank)))
            for dtype in _DTYPES:
                for elements in _SLICES if size > 2 and dtype == torch.float32 else _SLICES[1:2]:
                    waits = _started(ends, elements, dtype)
                    for what, wait in reversed(waits):
                        found, wanted = wait()
                        same(f"{kind}, {size} ranks, {dtype} {elements}: {what}", found, wanted)
            told = {
                (e.operation, e.dtype, e.group, e.group_size, e.bucket.split()[0])
                for e in ends.told
            }
            operations = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
            wanted_events = {
                (one, str(d).removeprefix("torch."), "role", size, one)
                for one in operations
                for d in _DTYPES
            }
            same("told", told, wanted_events if size > 1 else set())
            same("given back", sum(ends.ledger.bytes_by_category().values()), 0)


_Wait = Callable[[], tuple[Tensor, Tensor]]


def _started(ends: _Ends, elements: int, dtype: torch.dtype) -> list[tuple[str, _Wait]]:
    """Operations under way, by name, and how to wait for each and what must come of it."""
    made, size = ends.made, ends.made.size
    own = slice(made.rank * elements, (made.rank + 1) * elements)
    whole = size * elements
    waits: list[tuple[str, _Wait]] = []

    def then(what: str, wait: Callable[[], Any], found: Tensor | None, wanted: Tensor) -> None:
        def ended() -> tuple[Tensor, Tensor]:
            result = wait()
            return (result if found is None else found).to(wanted.dtype), wanted

        waits.append((what, ended))

    for number, average in enumerate((False, True)):
        parts = ends.all_parts(number, whole, dtype)
        total = torch.stack(parts).sum(0) / (size if average else 1)
        full = parts[made.rank].clone()
        result = torch.full((elements,), 99.0, dtype=dtype)
        bucket = f"reduce_scatter {number}"
        sums = made.reduce(full, result, bucket, average=average, total=dtype)
        then(f"reduce_scatter, average={average}", sums.wait, None, total[own])
        again = parts[made.rank].clone()
        sums = made.reduce(again, None, f"all_reduce {number}", average=average, total=dtype)
        then(f"all_reduce, average={average}", sums.wait, again, total)
    for number, in_place in enumerate((False, True), 2):
        parts = ends.all_parts(number, elements, dtype)
        full = torch.full((whole,), 99.0, dtype=dtype)
        mine = parts[made.rank].clone()
        if in_place:
            mine = full[own].copy_(mine)
        work = made.all_gather(full, mine, f"all_gather {number}")
        then(f"all_gather, in place={in_place}", work.wait, full, torch.cat(parts))
    parts = ends.all_parts(5, whole, dtype)
    first = parts[made.rank].clone()
    then("broadcast", made.broadcast(first, "broadcast 5").wait, first, parts[0])
    largest = parts[made.rank].clone()
    made.all_reduce_max(largest, "all_reduce 5")
    same("maximum", largest, torch.stack(parts).amax(0))
    for result_dtype in _DTYPES:
        widens = ends.kind != "native" and is_wider(result_dtype, dtype)
        if size == 1 or result_dtype == dtype or widens:
            parts = ends.all_parts(6, whole, dtype)
            into = torch.full((elements,), 99.0, dtype=result_dtype)
            bucket = f"reduce_scatter {result_dtype}"
            full = parts[made.rank]
            found = made.reduce(full, into, bucket, average=False, total=result_dtype)
            wanted = torch.stack(parts).double().sum(0)[own]
            then(f"into {result_dtype}", found.wait, into, wanted.to(result_dtype))
    return waits


def test_rows_and_flags_are_brought_together() -> None:
    """Of ranks with different numbers of rows, none among them; set by any, and by nobody."""
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = [torch.full((count, 2), float(n)) for n, count in enumerate((3, 0, 1, 2))]
    same("counts", row_counts(len(rows[rank]), group, _CPU), [3, 0, 1, 2])
    same("rows", gather_rows(rows[rank], group), torch.cat(rows))
    ids = range(10, 15)
    usage = Usage(group, ids, Streams(_CPU), EventBus())
    for unset in ({10, 11 + rank}, set(), {12} if rank else set(), set(ids)):
        usage.ask(set(ids) - unset)
        expected = unset if len(unset) > 2 else unset & {10}
        same("what nobody used", unused_by_all([usage]), expected)
        same("read again", unused_by_all([usage]), expected)
    rendezvous = UnitRendezvous(group, _CPU)
    for name in ("a", "b", "a"):
        rendezvous.wait(name)
    refuses(LifecycleError, "on some ranks only", lambda: rendezvous.wait(f"{rank}"))


def test_operations_begun_in_another_order_do_not_mix() -> None:
    """Gathers and sums of several communicators of one group, the other way round on odd ranks."""
    rank, ends = dist.get_rank(), [_Ends("point_to_point", dist.group.WORLD) for _ in range(3)]
    begun = [(number, gathers) for number in range(3) for gathers in (True, False)]
    waits: list[tuple[Any, Tensor | None, Tensor]] = []
    for number, gathers in begun if rank % 2 else begun[::-1]:
        made = ends[number].made
        parts = ends[number].all_parts(number, 8, torch.float32)
        if gathers:
            full = torch.zeros(8 * made.size)
            waits.append((made.all_gather(full, parts[rank], "one"), full, torch.cat(parts)))
        else:
            own, total = torch.zeros(2), torch.float32
            work = made.reduce(parts[rank].clone(), own, "two", average=False, total=total)
            waits.append((work, None, torch.stack(parts).sum(0)[2 * rank : 2 * rank + 2]))
    for work, full, wanted in waits:
        found = work.wait()
        same("gathered" if full is not None else "summed", found if full is None else full, wanted)


def test_a_gather_in_place_needs_no_other_memory() -> None:
    """The own slice is a view of the buffer, which has 262144 bytes."""
    ends = _Ends("point_to_point", dist.group.WORLD)
    full = torch.zeros(1 << 16)
    parts = full.tensor_split(ends.made.size)
    parts[ends.made.rank].fill_(ends.made.rank + 1.0)
    address = full.data_ptr()
    with torch.profiler.profile(profile_memory=True) as profiled:
        ends.made.all_gather(full, parts[ends.made.rank], "bucket").wait()
    same("gathered", [float(part.mean()) for part in parts], [1.0, 2.0, 3.0, 4.0])
    same("in place", (full.data_ptr(), ends.ledger.peak_bytes), (address, 0))
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    assert allocated < 4096, allocated  # bookkeeping


def test_gloo_exchanges_directly_by_default_where_gradients_are_scattered() -> None:
    for strategy in range(4):
        model, _ = pair(strategy)
        groups = [g for unit in model._context.units for g in unit.buckets]
        kind = PointToPointCommunicator if strategy else Communicator
        same(f"strategy {strategy}", type(groups[0].gradients._inner.communicator), kind)


def test_a_group_of_several_names_is_registered_once_and_agrees_on_all_ranks() -> None:
    """Memory of communication buffers."""
    streams: Any = Streams(_CPU)
    streams.registrar = lambda _group: object()
    streams.use_pool_of = lambda _backend: object()
    world: Any = dist.group.WORLD
    found = user_buffers([("inner", world), ("gather", world)], streams, symmetric=True)
    same("each once", [member.name for member in found.members], ["inner"])
    same("of all ranks", found.members[0].agree(dist.get_rank()), [0, 1, 2, 3])
