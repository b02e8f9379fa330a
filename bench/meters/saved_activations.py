"""Bytes that autograd keeps for the backward: the activations of a training step, measured.

Slow (a Python call for every saved tensor), so only memory profiles use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench.engines.dtypes import local_tensor


class SavedActivations(saved_tensors_hooks):
    """Context: follows saved tensors from the moment they are saved until their graph is freed.

    Two views of one storage count once. Parameters do not count: they are weights. Copies of
    weights that autocast makes do count, because they live as long as activations do. alive_bytes:
    what autograd keeps now.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda saved: saved.tensor)
        self._model = model
        self._holders: dict[int, int] = {}
        self.alive_bytes = 0
        self.peak_bytes = 0
        #: Called with every change of the bytes that are alive, while there is one.
        self.observer: Callable[[int], None] | None = None

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> _Saved:
        # Looked up anew for every tensor: a sharding engine gives its parameters new storage as it
        # gathers them, and freed storage is handed to activations.
        if _address(tensor) in {_address(local_tensor(p.data)) for p in self._model.parameters()}:
            return _Saved(tensor, None)
        return _Saved(tensor, self)

    def hold(self, address: int, size_bytes: int) -> None:
        """One more saved tensor on the storage at `address`."""
        holders = self._holders.get(address, 0)
        self._holders[address] = holders + 1
        if holders == 0:
            self.alive_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
            if self.observer is not None:
                self.observer(size_bytes)

    def release(self, address: int, size_bytes: int) -> None:
        """One saved tensor less; the last one takes the bytes with it."""
        self._holders[address] -= 1
        if self._holders[address] == 0:
            del self._holders[address]
            self.alive_bytes -= size_bytes
            if self.observer is not None:
                self.observer(-size_bytes)


class _Saved:
    """What autograd keeps in place of the tensor; it disappears with the graph."""

    __slots__ = ("_account", "_address", "_size_bytes", "tensor")

    def __init__(self, tensor: Tensor, account: SavedActivations | None) -> None:
        self.tensor = tensor
        self._account = account
        self._address = _address(tensor)
        self._size_bytes = tensor.untyped_storage().nbytes()
        if account is not None:
            account.hold(self._address, self._size_bytes)

    def __del__(self) -> None:
        if self._account is not None:
            self._account.release(self._address, self._size_bytes)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
