"""Counts the tensor storage of a rank that is alive between two steps, whoever holds it.

[Note: live storage] Whatever torch's dispatcher gives out from before the model is built until the
end of step 2 is remembered by a weak reference and its call site; what lives then is counted, a
storage once. Tensors that Python holds and that did not come that way (of NumPy, of a thread) are
added. Later steps, the timed ones, run without all this: the first two never count for times. A
model under torch.compile is followed through its set-up alone, as its compiler would trace this.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.derive.live_storage import LiveRow, LiveStorage
from bench.meters.call_sites import CallSites
from bench.meters.operation_counter import dispatches, tensors_in

_LAST_STEP: Final = 2


class LiveStorageMeter(TorchDispatchMode):
    """`start` before the model is built, `built` after its engine; `found` after step 2."""

    def __init__(self, sites: CallSites, device: torch.device, steps: int) -> None:
        super().__init__()
        self._sites = sites
        self._device = device.type
        self._step = min(_LAST_STEP, steps)
        self._made: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._follows = False
        self.found: LiveStorage | None = None

    def start(self) -> None:
        """Remember what is made from now on."""
        self._follows = True
        self.__enter__()

    def built(self, *, compiled: bool) -> None:
        """Set-up is over."""
        if compiled:
            self._leave()

    def after_step(self, step: int) -> None:
        """Callback of the loop, between two steps."""
        if step == self._step:
            self._leave()
            self.found = self._count()
            self._made.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below, and loads its compiler for that.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember storages of one operation; a tensor subclass comes back as its own tensors."""
        if any(dispatches(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if _has_storage(tensor):
                self._remember(tensor.untyped_storage())
        return result

    def _remember(self, storage: torch.UntypedStorage) -> None:
        # A weak reference keeps the address of a storage from being used again.
        if storage._cdata not in self._made:
            site, line = self._sites.of_frame(sys._getframe(2))
            self._made[storage._cdata] = (StorageWeakRef(storage), site, line)

    def _leave(self) -> None:
        if self._follows:
            self._follows = False
            self.__exit__(None, None, None)

    def _count(self) -> LiveStorage:
        gc.collect()  # what only cycles hold is as good as gone
        rows: dict[str, LiveRow] = {}
        for storage, site, line in self._alive():
            if storage.device.type == self._device and storage.nbytes():
                row = rows.get(site) or LiveRow(site=site, line=line, bytes=0, storages=0)
                more = {"bytes": row.bytes + storage.nbytes(), "storages": row.storages + 1}
                rows[site] = row.model_copy(update=more)
        return LiveStorage(
            step=self._step,
            bytes=(sum(row.bytes for row in rows.values()),),
            rows=tuple(rows.values()),
        )

    def _alive(self) -> Iterator[tuple[torch.UntypedStorage, str, int]]:
        """Every storage once, with who has made it."""
        for reference, site, line in self._made.values():
            if not reference.expired():
                yield torch.UntypedStorage._new_with_weak_ptr(reference.cdata), site, line
        seen = set(self._made)
        for storage in _held_by_python():
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage, "", 0


def _held_by_python() -> list[torch.UntypedStorage]:
    held: list[torch.UntypedStorage] = []
    with torch._C.DisableTorchFunctionSubclass():
        objects = gc.get_objects()
        kinds = set(map(type, objects))  # a thousand, of half a million objects
        storages = {kind for kind in kinds if issubclass(kind, torch.UntypedStorage)}
        tensors = {kind for kind in kinds if issubclass(kind, Tensor) and not dispatches(kind)}
        for obj in objects:
            if type(obj) in storages:
                held.append(obj)
            elif type(obj) in tensors and _has_storage(obj):
                held.append(obj.untyped_storage())
    return held


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"
