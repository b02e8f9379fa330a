"""User buffers: memory of NCCL's own allocator, registered with every group that uses it.

    pool of the backend's allocator -> every lasting buffer and slot is allocated in it
        -> segments compared over ranks -> registered, group by group, once, in one order
        -> deregistered before the pool or the process group goes

[Note: closing user buffers] Deregistering waits for the device, so it must happen neither while a
graph is captured nor on any thread at any time, as a garbage collector would have it. A model's
`param_and_grad_buffer.close()` does it. Of a model that has gone without it memory and registration
are kept, and closed when the next model makes user buffers.

[Note: register last] Memory that is allocated after a registration is not a part of it (torch
2.14 and later; before, it could hang). So all of it is allocated first, and its segments are
compared: symmetric windows need the same sizes in the same order on all ranks.

Each group is registered as symmetric windows where that is wanted and works on all of its ranks,
else as plain buffers, else not at all. What was not reached is kept with its reason, and warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from mfsdp_core.comm.agreement import from_all
from mfsdp_core.errors import LifecycleError
from mfsdp_core.streams import DevicePool, Streams

_abandoned: list[UserBuffers] = []

Level = Literal["symmetric", "plain", "none"]


@dataclass
class Member:
    """A group whose collectives use the memory.

    backend: NCCL's, which registers and deregisters pools; collective for symmetric windows.
    agree: from this rank's value to those of all ranks of the group. Collective. level, reason:
    what was reached, and why not more.
    """

    name: str
    backend: Any
    agree: Callable[[object], Sequence[object]]
    level: Level = "none"
    reason: str = ""


@dataclass
class UserBuffers:
    """The pool of one model and the groups it is registered with, in the order of `members`."""

    members: list[Member]
    pool: DevicePool
    streams: Streams
    symmetric: bool = True
    _registered: list[int] | None = field(default=None, init=False)
    _ranges: list[tuple[int, int]] = field(default_factory=list, init=False)
    _outside: dict[str, int] = field(default_factory=dict, init=False)

    def register(self) -> None:
        """Register with every group; warns where a group did not get what was wanted. Collective.

        Raises:
            LifecycleError: it was registered before, or a rank cannot tell what there is.
        """
        if self._registered is not None:
            raise LifecycleError(
                "communication buffers are registered already, and a second registration would "
                "fail on some groups and not on others. Call manual_buffer_registration() once, "
                "after the first iteration, and leave it out otherwise."
            )
        segments = self._allocated()
        for member in self.members:
            # The exchange is a barrier as well: no rank registers while another still computes.
            everywhere = member.agree(segments)
            failed = [one for one in everywhere if isinstance(one, str)]
            if failed:
                raise LifecycleError(f"nccl_ub: registering failed on a rank: {failed[0]}")
            self.streams.synchronize()
            if not segments:
                member.reason = "no buffer was allocated in the pool"
            elif any(other != segments for other in everywhere):
                found = " and ".join(map(str, dict.fromkeys(map(str, everywhere))))
                member.reason = f"the pool's segments differ between ranks: {found} bytes"
            else:
                self._register_with(member)
        for member in self.members:
            if member.level != self.wanted:
                warnings.warn(
                    f"nccl_ub: group {member.name} got {member.level} registration instead of "
                    f"{self.wanted}: {member.reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _allocated(self) -> list[int] | str:
        """Sizes of the segments; an error's text, which all ranks are to end with."""
        try:
            self.streams.synchronize()
            segments = self._registered = self.pool.segment_bytes()
            self._ranges = self.pool.ranges()
        except Exception as error:
            return _text(error)
        self.streams.check_memory = self._check
        return segments

    @property
    def wanted(self) -> Level:
        """What was requested."""
        return "symmetric" if self.symmetric else "plain"

    def close(self) -> None:
        """Deregister from every group, last first. Does nothing the second time."""
        self.streams.synchronize()
        for member in reversed(self.members):
            if member.level != "none":
                member.level, member.reason = "none", "deregistered"
                member.backend.deregister_mem_pool(self.pool.raw)

    def abandon(self) -> None:
        """Nobody uses them any more; see [Note: closing user buffers]."""
        if any(member.level != "none" for member in self.members):
            _abandoned.append(self)

    def report(self) -> dict[str, Any]:
        """For the record: what was wanted, what each group got, and how much memory it is.

        grown: whether memory was allocated in the pool after the registration, which it lacks.
        outside: collectives since then with memory that is not registered, and the bytes of their
        largest such tensor. What a group got does not hold for them.
        """
        now = self.pool.segment_bytes()
        return {
            "wanted": self.wanted,
            "groups": {m.name: {"got": m.level, "reason": m.reason} for m in self.members},
            "bytes": sum(now),
            "segments": len(now),
            "registered": self._registered is not None,
            "grown": self._registered is not None and now != self._registered,
            "outside": dict(sorted(self._outside.items())),
        }

    def _check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            start, size = tensor.data_ptr(), tensor.nbytes
            if size > self._outside.get(name, 0) and not any(
                first <= start and start + size <= end for first, end in self._ranges
            ):
                self._outside[name] = size

    def _register_with(self, member: Member) -> None:
        refusals: list[str] = []
        wanted: tuple[Level, ...] = ("symmetric", "plain") if self.symmetric else ("plain",)
        for level in wanted:
            refusal = self._attempt(member, level)
            refusals_everywhere = [one for one in member.agree(refusal) if one]
            if not refusals_everywhere:
                member.level, member.reason = level, "; ".join(refusals)
                return
            if refusal is None:
                member.backend.deregister_mem_pool(self.pool.raw)
            refusals.append(f"{level}: {refusals_everywhere[0]}")
        member.reason = "; ".join(refusals)

    def _attempt(self, member: Member, level: Level) -> str | None:
        """Register; the error's text where that fails."""
        windows = {"symm": True} if level == "symmetric" else {}
        try:
            member.backend.register_mem_pool(self.pool.raw, **windows)
        except Exception as error:  # whatever it is, other ranks wait to hear of it
            return _text(error)
        return None


def user_buffers(
    groups: Sequence[tuple[str, dist.ProcessGroup]], streams: Streams, *, symmetric: bool
) -> UserBuffers:
    """Of NCCL groups by name, each once, in the order given. Collective: communicators are made.

    From here on `streams.communicated()` allocates in the pool.

    Raises:
        ConfigurationError: the device has no NCCL.
    """
    while _abandoned:
        _abandoned.pop().close()
    pool = streams.use_pool_of(streams.registrar(groups[0][1]))
    members: dict[int, Member] = {}
    for name, group in groups:
        if id(group) not in members and group.size() > 1:
            # A group without a communicator cannot register; its first collective makes it.
            dist.all_reduce(torch.zeros(1, device=streams.device), group=group)
            members[id(group)] = Member(name, streams.registrar(group), partial(from_all, group))
    return UserBuffers(list(members.values()), pool, streams, symmetric)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
