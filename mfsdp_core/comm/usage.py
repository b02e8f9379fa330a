"""Which trainable parameters got a gradient in a cycle, on any rank.

[Note: unused parameters] Plain torch leaves `.grad` of a parameter None that no backward pass has
reached, and optimizers leave such a parameter alone. A rank does not know what the others used, so
all of them reduce one byte per parameter at the end of a cycle, while gradients are on their way.
A rank that used every parameter itself has nothing to learn, and does not read the result: a model
that leaves nothing out never waits for it. Another one reads it once, when somebody reads `.grad`
of a parameter that it left out itself, as the step does: the host waits for the device there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.events import Event, EventBus
from mfsdp_core.streams import InFlight, Streams


@dataclass
class Usage:
    """Of the parameters that the ranks of `group` share: the dense ones, or the experts'.

    parameters: ids of their raw faces, in the same order on all ranks. unset: those that this rank
    has not used.
    """

    group: dist.ProcessGroup
    parameters: Sequence[int]
    streams: Streams
    events: EventBus
    unset: list[int] = field(default_factory=list, init=False)
    _bits: torch.Tensor = field(init=False)
    _work: InFlight | None = field(default=None, init=False)

    def ask(self, used: Collection[int]) -> None:
        """Start to find out what all ranks together have used. Collective."""
        self._wait()
        unset = [index for index, one in enumerate(self.parameters) if one not in used]
        self.unset = [self.parameters[index] for index in unset]
        self._bits = self.streams.ones_but(len(self.parameters), unset)
        if self.group.size() > 1:
            if "agreement" in self.events.wanted:
                dtype, size = dtype_name(self._bits.dtype), self._bits.nbytes
                sent = Event("agreement", "all_reduce", dtype, size, "", self.group.size(), "")
                self.events.publish(sent)
            work = dist.all_reduce(
                self._bits, op=dist.ReduceOp.MAX, group=self.group, async_op=True
            )
            self._work = self.streams.track((work,), "all_reduce of flags", self._bits)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def unused_by_all(usages: Sequence[Usage]) -> set[int]:
    """The parameters that no rank has used, by one read for all of `usages`, or none."""
    asked = [usage for usage in usages if usage.unset]
    if not asked:
        return set()
    for usage in asked:
        usage._wait()
    parameters = chain.from_iterable(usage.parameters for usage in asked)
    bits = torch.cat([usage._bits for usage in asked]).tolist()
    return {parameter for parameter, bit in zip(parameters, bits, strict=True) if not bit}
