"""Whether a step, captured once, would do the same when it is replayed: two are compared.

A CUDA graph repeats kernels with the addresses and numbers they had at its capture, and nothing of
what the host does. So a step can be replayed if the one after it enqueues the same operations, in
the same order, on memory at the same addresses, with the same numbers, and the host reads nothing.
Memory that the step itself makes is named by the order in which it is made: a graph has a pool of
its own for it. All of this can be seen on any device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core.observer import Observer, span_of

#: Operations whose result the host needs before it can go on.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal")
#: Methods by which Python reads memory of the CPU without an operation.
_PYTHON_READS = frozenset({"tolist", "numpy", "item", "__array__"})
_MASKS = (torch.bool, torch.uint8)
_MOST_NAMED = 3
_MOST_VALUES = 16
_TORCH = str(Path(torch.__file__).parent)


class Operand(NamedTuple):
    """Memory of an operation.

    made: the number of the step's allocation that it is, None if it was there before. address:
    within that, or absolute.
    """

    made: int | None
    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Entry(NamedTuple):
    """One thing enqueued: its tensors, and everything else that it was given, as text."""

    name: str
    operands: tuple[Operand, ...]
    constants: tuple[str, ...] = ()


class Recording(TorchDispatchMode, Observer):
    """What one step enqueues, in order.

    host_reads: operations or methods, with the line of Python that called them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.host_reads: list[str] = []
        self._made: dict[int, int] = {}
        self._allocations = 0
        self._groups: dict[int, str] = {}
        self._collectives = 0
        self._is_reading = False
        self._is_over = False
        self._watched = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what this thread and its backward passes do."""
        before = sys.getprofile()
        self._watched.here = True
        with self:
            sys.setprofile(self._see_call)
            try:
                yield
            finally:
                sys.setprofile(before)
                self._is_over = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and note it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on what this rank holds
        result = func(*args, **(kwargs or {}))
        if not getattr(self._watched, "here", False):  # a thread of autograd
            self._watched.here = True
            sys.setprofile(self._see_call)
        name = func._schema.name
        is_collective = name.startswith(("c10d::", "_c10d_functional::"))
        if not (is_collective or self.is_in_backend):  # noted where they are tracked
            self._note(func, name, args, kwargs or {}, result)
        return result

    def issued(
        self, name: str, group: object, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> int:
        """A collective starts."""
        self._collectives += 1
        where = self._groups.setdefault(id(group), f"group {len(self._groups)}")
        self.entries.append(Entry(name, tuple(map(self._operand, (*reads, *writes))), (where,)))
        return self._collectives

    def waited(self, number: int) -> None:
        """The current stream waits for it."""
        super().waited(number)
        self.entries.append(Entry("wait", (), (str(number),)))

    def resized(self, memory: Tensor, *, stays: bool) -> None:
        """Made by the step, without an operation."""
        if stays:
            self._make(memory)

    def released(self, memory: Tensor, name: object) -> None:
        """Memory goes back."""
        self.entries.append(Entry(f"release of {name}", (self._operand(memory),)))

    def _note(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        values = [*args, *kwargs.values()]
        if name == "aten::lift_fresh":
            self._note_constant(args[0])
            return
        tensors = _tensors(values)
        operands = [self._operand(tensor) for tensor in tensors]
        if _is_read(name, tensors, result):
            self.host_reads.append(f"{name} {_caller()}")
        elif _is_from_pageable(tensors, result):
            self.host_reads.append(f"{name} from memory that is not pinned {_caller()}")
        returns = func._schema.returns
        results = result if isinstance(result, (list, tuple)) else [result]
        is_view = False
        for index, one in enumerate(results):
            alias = returns[min(index, len(returns) - 1)].alias_info if returns else None
            if isinstance(one, Tensor) and alias is None:
                self._make(one)
            is_view |= alias is not None and not alias.is_write
        if not is_view:
            self.entries.append(Entry(name, tuple(operands), _constants(values)))

    def _note_constant(self, tensor: Tensor) -> None:
        """Numbers of Python that became a tensor: a graph repeats them."""
        self._make(tensor)
        values: tuple[str, ...] = ()
        if tensor.device.type == "cpu" and tensor.numel() <= _MOST_VALUES:
            self._is_reading = True
            values = (str(tensor.tolist()),)
            self._is_reading = False
        self.entries.append(Entry("a tensor of numbers", (self._operand(tensor),), values))

    def _make(self, tensor: Tensor) -> None:
        span = span_of(tensor)
        if span.end > span.start:
            self._allocations += 1
            self._made[_base(tensor)] = self._allocations

    def _operand(self, tensor: Tensor) -> Operand:
        span = span_of(tensor)
        if span.end == span.start:
            return Operand(None, 0, tuple(tensor.shape), tensor.dtype)
        base = _base(tensor)
        made = self._made.get(base)
        address = span.start if made is None else span.start - base
        return Operand(made, address, tuple(tensor.shape), tensor.dtype)

    def _see_call(self, _frame: Any, event: str, called: Any) -> None:
        if self._is_over:
            sys.setprofile(None)
        if self._is_over or self._is_reading or event != "c_call":
            return
        if getattr(called, "__name__", "") not in _PYTHON_READS:
            return
        if isinstance(getattr(called, "__self__", None), Tensor):
            self.host_reads.append(f"Tensor.{called.__name__} {_caller()}")


def differences(first: Recording, second: Recording) -> list[str]:
    """Why the two steps could not be one graph, the most telling reasons first; [] if they could.

    second: the step that followed `first`.
    """
    reads = dict.fromkeys(second.host_reads)
    found = [f"the host reads memory of the device: {read}" for read in reads]
    pairs = list(zip(first.entries, second.entries, strict=False))
    for number, (before, after) in enumerate(pairs, start=1):
        why = _difference(before, after)
        if why is not None:
            found.append(f"operation {number}, {after.name}, {why}")
            if before.name != after.name:
                return found[:_MOST_NAMED]
    if len(first.entries) != len(second.entries):
        counts = f"{len(first.entries)} operations in one step and {len(second.entries)} in the"
        found.append(f"there are {counts} next")
    return found[:_MOST_NAMED]


def _difference(before: Entry, after: Entry) -> str | None:
    if before.name != after.name:
        return f"was {before.name} in the step before"
    if before.constants != after.constants:
        pairs = zip(before.constants, after.constants, strict=False)
        changed = next(((a, b) for a, b in pairs if a != b), (before.constants, after.constants))
        return f"has {changed[1]} where the step before had {changed[0]}: a graph repeats one"
    for one, other in zip(before.operands, after.operands, strict=False):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"works on {tuple(other.shape)} where the step before had {tuple(one.shape)}"
        if one != other:
            return "works on memory at another address than in the step before"
    return None if len(before.operands) == len(after.operands) else "has more or fewer tensors"


def _is_read(name: str, tensors: Sequence[Tensor], result: Any) -> bool:
    plain = name.removeprefix("aten::")
    if plain in _READS:
        return True
    if plain in {"index", "index_put", "index_put_"}:
        return any(tensor.dtype in _MASKS for tensor in tensors[1:])
    arrives = isinstance(result, Tensor) and result.device.type == "cpu"
    return arrives and any(tensor.device.type == "cuda" for tensor in tensors)


def _is_from_pageable(tensors: Sequence[Tensor], result: Any) -> bool:
    """Whether a copy to the device begins in memory that the device cannot read by itself."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    if not any(getattr(one, "is_cuda", False) for one in results):
        return False
    return any(one.device.type == "cpu" and one.ndim and not one.is_pinned() for one in tensors)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _constants(values: Sequence[Any]) -> tuple[str, ...]:
    plain = (bool, int, float, complex, str, torch.dtype, torch.device)
    found: list[str] = []
    for value in values:
        items = value if isinstance(value, (list, tuple)) else (value,)
        found += [str(one) for one in items if isinstance(one, plain)]
    return tuple(found)


def _base(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.untyped_storage().data_ptr()


def _caller() -> str:
    """The innermost line of Python outside of torch and of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            return f"({name}:{frame.f_lineno})"
        frame = frame.f_back
    return "(torch)"
