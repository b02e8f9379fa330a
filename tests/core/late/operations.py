"""A program on the late device: operations are put on streams, and `torch.cuda` is the device's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from late.device import LateDevice, LateGraph, Stream
from late.group import late_batch
from mfsdp_core.streams import CudaStreams, Streams

_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::index", "aten::index_put_")
_MASKS = (torch.bool, torch.uint8)


@contextmanager
def late_device(seed: int) -> Iterator[LateDevice]:
    """Everything inside the block runs late, and has run behind it."""
    device = LateDevice(seed)
    with ExitStack() as stack:
        for owner, name, twin in _twins(device):
            stack.enter_context(patch.object(owner, name, twin))
        stack.enter_context(Operations(device))
        yield device
        device.synchronize()


def _twins(device: LateDevice) -> list[tuple[Any, str, Any]]:
    """What stands for what: the core's own `CudaStreams` finds these instead of CUDA."""
    numbers = itertools.count(1)

    @contextmanager
    def graph(made: LateGraph, *, stream: Stream, **_: str) -> Iterator[None]:
        with device.capturing(made, stream):
            yield

    return [
        (LateDevice, "now", device),
        (Streams, "of", CudaStreams),
        (CudaStreams, "host_memory", partial(_host_memory, device)),
        (torch.UntypedStorage, "resize_", _resized(device)),
        (Tensor, "tolist", _read(device, "tolist")),
        (Tensor, "numpy", _read(device, "numpy")),
        (torch.cuda, "Stream", lambda _, **__: device.stream(f"stream {next(numbers)}")),
        (torch.cuda, "current_stream", lambda _: device.current),
        (torch.cuda, "stream", device.on),
        (torch.cuda, "synchronize", lambda _: device.synchronize()),
        (torch.cuda, "CUDAGraph", partial(LateGraph, device)),
        (torch.cuda, "graph", graph),
        (dist, "batch_isend_irecv", late_batch),
    ]


class LocalOperations(TorchDispatchMode):
    """Passes on operations on what this rank holds: those on DTensors come again as such."""

    operate: Callable[..., Any]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_again = any(issubclass(kind, DTensor) for kind in types)
        return NotImplemented if is_again else self.operate(func, args, kwargs or {})


class Operations(LocalOperations):
    """Puts every operation on the current stream of the device."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _happens_at_once(func):
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        of_host = [*map(self._device.is_of_host, given)]
        if any(of_host) and not kwargs.get("non_blocking", args[2:3] == (True,)):
            if not all(of_host):
                self._device.synchronize(self._device.current)
            return tree_map_only(Tensor, self._device.hosted, func(*args, **kwargs))
        arguments = [one.alias_info for one in func._schema.arguments]
        makes = any(one.alias_info is None for one in func._schema.returns)
        writes = any(one is not None and one.is_write for one in arguments)
        if host_reads(func, args, kwargs) or (makes and writes):
            self._device.synchronize(self._device.current)
            return func(*args, **kwargs)
        made = self._made(func, args, kwargs) if makes else ()
        if "empty" not in func._schema.name:
            self._enqueue(func, args, kwargs, made)
        return made if makes else _given(func, args, kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Memory for the results: what they are like is found out by a trial, on anything."""
        return tree_map_only(Tensor, self._device.allocate, func(*args, **kwargs))

    def _enqueue(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        args, kwargs, made = tree_map_only(Tensor, self._device.beneath, (args, kwargs, made))

        def run() -> None:
            results = func(*args, **kwargs)
            for target, value in zip(tree_leaves(made), tree_leaves(results), strict=False):
                if isinstance(target, Tensor):
                    target.copy_(value)

        leaves = tree_leaves((args, kwargs, made))
        touches = [one for one in leaves if isinstance(one, Tensor)]
        self._device.enqueue(run, touches=touches)


def _happens_at_once(func: Any) -> bool:
    """Whether no memory is read or written, or the host's alone.

    Views, and what DTensor asks for shapes. What draws is not tried first: it would draw twice.
    """
    returns = [one.alias_info for one in func._schema.returns]
    is_view = bool(returns) and all(one is not None and not one.is_write for one in returns)
    once = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return is_view or is_fake or func.namespace != "aten" or not once.isdisjoint(func.tags)


def _given(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns that writes into its arguments."""
    found = []
    for returned in func._schema.returns:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and (
                argument.alias_info.before_set == returned.alias_info.before_set
            ):
                found.append(args[index] if index < len(args) else kwargs[argument.name])
                break
    return found[0] if len(found) == 1 else tuple(found) or None


def host_reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host needs the result before it can go on."""
    name = func._schema.name
    if _READ_TAGS.isdisjoint(func.tags) and name not in _READS:
        return False
    tensors = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, Tensor)]
    return not name.startswith("aten::index") or any(one.dtype in _MASKS for one in tensors)


def _read(device: LateDevice, name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.has(tensor):
            device.synchronize(device.current)
        return plain(tensor, *args, **kwargs)

    return read


def _host_memory(device: LateDevice, elements: int, dtype: torch.dtype) -> Tensor:
    with torch._C._DisableTorchDispatch():
        return device.hosted(torch.full((elements,), torch.nan, dtype=dtype))


def _resized(device: LateDevice) -> Callable[..., Any]:
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size_bytes: int) -> Any:
        if device.resize(storage.data_ptr(), size_bytes):
            return storage
        return plain(storage, size_bytes)

    return resize_
