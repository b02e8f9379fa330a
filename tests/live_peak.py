"""The most bytes of tensor storage that live at one time, of all that operators make on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.meters.operation_counter import dispatches, tensors_in

SMALL_BYTES = 2**14
"""What is smaller is counted when the next larger storage is made."""


class LivePeak(TorchDispatchMode):
    """Counts while it is active. peak: bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(dispatches(one) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        has_grown = False
        for tensor in tensors_in(result):
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made:
                    self._made[storage._cdata] = StorageWeakRef(storage)
                    has_grown |= storage.nbytes() >= SMALL_BYTES
        if has_grown:
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes, now."""
        storages = []
        for key, reference in list(self._made.items()):
            # One that another thread is about to free has gone between the two questions.
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if reference.expired() or storage is None:
                del self._made[key]
            else:
                storages.append(storage)
        return sum(storage.nbytes() for storage in storages)

    def reset(self, _device: torch.device) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self.peak = self.alive()
