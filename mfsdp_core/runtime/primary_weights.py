"""Weights of a bucket that modules compute with as they are gathered: codes.

There is no full buffer of decoded values; see `mfsdp_core.precision.transformer_engine`. Tensors of
modules are views of the gathered payloads, whose storage comes and goes.
"""

from __future__ import annotations

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.precision.transformer_engine import PrimaryBucket
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.runtime.weight_buffers import Residency, WeightBuffers, moves_nothing


class PrimaryWeights(WeightBuffers):
    """Storage and gathering of such weights. `main` is filled before `adopt`."""

    _codec: PrimaryBucket

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        *,
        events: EventBus,
    ) -> None:
        super().__init__(spec, communicators, allocators, on_move=moves_nothing, events=events)
        self.main = self._lasting.acquire(spec.key("main_weights")).zero_()

    @property
    def full_bytes(self) -> int:
        """Bytes of what is gathered, for one direction."""
        table = self._spec.buffers
        rows = [table.find("payload", name) for name in self._names["forward"]]
        return sum(row.elements for row in rows if row is not None)

    def adopt(self) -> None:
        """Quantise the main weights, and let the modules' tensors look at the core's memory."""
        for name in self._encoded:
            key = self._spec.key("payload_shard", name)
            self._sources[name] = self._lasting.acquire(key).zero_()
        self._parts = {name: self._sub_part(source) for name, source in self._sources.items()}
        self._codec.show({name: self._payload(name) for name in self._encoded})
        self.install()
        if not self._persistent:
            self._enter("release")
            self._free()
            self._codec.drop_copies()

    def release(self) -> None:
        """Free the codes, and what was made of them, unless this bucket stays."""
        super().release()
        if self.state is Residency.EMPTY:
            self._codec.drop_copies()
