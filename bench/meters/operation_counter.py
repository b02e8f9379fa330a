"""Counts what one step of one rank does, as the dispatcher and the interpreter see it.

Below autograd: a dispatch mode, which autograd's threads inherit. Python calls, storages that
grow and blocking calls: the interpreter's profile function, in every thread that dispatches, and
Python lines of the engine's own files, as loops that call nothing, by its trace function.
Reads by the host, which waits for the device: operations that return numbers or need them, copies
to a CPU, and on a CPU `Tensor.tolist` and `numpy`, which dispatch nothing there. Not what torch's
optimizers read of the number of steps, which they keep on the CPU on any device.
Waits for collectives: `Work.wait`, for as long as the counter counts; torch publishes no event for
them. What the counter itself does is left out. Work that C++ does below an operation (the
reductions inside of gloo, workspaces of a kernel) is not seen. Nor is what `_CONNECTIONS` does,
which reads the memory of peers when they are ready, at any time and on any thread: an exchange
counts where it is sent, and where it is waited for.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.derive.counts import CountRow, Kind
from bench.meters.call_sites import CallSites, is_of_engine

_FILLS: Final = frozenset(
    ("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like")
) | {"new_zeros", "new_ones", "new_full", "_foreach_zero_"}
_COPIES: Final = frozenset(("copy_", "_to_copy", "clone", "cat", "stack", "_foreach_copy_"))
_COPIES_ELSEWHERE: Final = ("_copy", "_copy_in", "chunk_cat")
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear")
_READS: Final = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
) | {
    "_unique2",
    "unique_dim",
}
#: What reads a tensor of a CPU without an operation.
_PYTHON_READS: Final = frozenset(("tolist", "numpy", "__array__"))
_OPTIMIZERS: Final = str(Path(torch.__file__).parent / "optim")
_BLOCKING: Final = frozenset(("wait", "sleep", "synchronize", "_cuda_synchronize"))
_HERE: Final = __file__


@dataclass(frozen=True)
class _Schema:
    """What does not change from call to call. written: indices of arguments that are mutated."""

    operation: str
    kind: Kind
    written: frozenset[int]
    product: bool


_Key = tuple[str, Kind, str, str]
_Tracer = Callable[[FrameType, str, Any], Any]


class _Amounts:
    """Sums of one key; not a model, as they grow inside of the step."""

    __slots__ = ("allocated_bytes", "allocations", "bytes", "count", "exposed", "line")

    def __init__(self) -> None:
        self.count = self.bytes = self.allocations = self.allocated_bytes = 0
        self.exposed = self.line = 0


class OperationCounter(TorchDispatchMode):
    """Use `with counter.counting(): step()`, then `rows()`."""

    def __init__(self, sites: CallSites) -> None:
        super().__init__()
        self._sites = sites
        self._amounts: dict[_Key, _Amounts] = {}
        self._schemas: dict[Any, _Schema] = {}
        self._works: dict[int, tuple[Any, int]] = {}
        self._products = 0
        self._local = threading.local()
        self._active = False
        self._tracers: dict[CodeType, _Tracer | None] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count everything in the block; the garbage collector, whose time is its own, waits."""
        gc.collect()
        gc.disable()
        wait, before, traced = dist.Work.wait, sys.getprofile(), sys.gettrace()
        counter = self

        def counted(work: Any, *arguments: Any, **named: Any) -> Any:
            counter._waited(work, sys._getframe(1))
            return wait(work, *arguments, **named)

        dist.Work.wait = counted  # type: ignore[assignment, method-assign]
        self._active = True
        try:
            with _eager(), self:
                self._watch_thread()
                yield
        finally:
            sys.setprofile(before)
            sys.settrace(traced)
            self._active = False
            dist.Work.wait = wait  # type: ignore[method-assign]
            self._works.clear()
            gc.enable()

    def rows(self) -> list[CountRow]:
        """Everything counted so far, in a fixed order."""
        return [
            CountRow(
                operation=key[0],
                kind=key[1],
                dtype=key[2],
                site=key[3],
                **{name: getattr(amounts, name) for name in _Amounts.__slots__},
            )
            for key, amounts in sorted(self._amounts.items())
            if amounts.count
        ]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below, and loads its compiler for that within the step.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation; what a tensor subclass does with it comes back as its own."""
        if any(dispatches(kind) for kind in types):
            return NotImplemented
        self._local.inside = True
        try:
            result = func(*args, **(kwargs or {}))
            if self._active:
                self._operation(func, args, kwargs or {}, result)
        finally:
            self._local.inside = False
            if self._active and not getattr(self._local, "watched", False):
                self._watch_thread()
        return result

    def _watch_thread(self) -> None:
        self._local.watched = True
        self._local.inside = False
        sys.setprofile(self._profile)
        sys.settrace(self._trace)

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = self._schemas.get(func) or self._schema(func)
        outputs = tensors_in(result)
        if schema.operation.startswith("profiler.") or any(
            isinstance(tensor, FakeTensor) for tensor in outputs
        ):
            return
        written = [t for i, arg in enumerate(args) if i in schema.written for t in tensors_in(arg)]
        read = [t for i, arg in enumerate(args) if i not in schema.written for t in tensors_in(arg)]
        read += tensors_in(tuple(kwargs.values()))
        known = {t.untyped_storage()._cdata for t in (*written, *read)}
        fresh = {t.untyped_storage()._cdata: t for t in outputs}
        fresh = {cdata: t for cdata, t in fresh.items() if cdata not in known and t.nbytes}
        kind, dtype = _dtype(schema.kind, read, written or outputs)
        if _is_read(schema, read, written or outputs, sys._getframe(2)):
            kind = "host_read"
        site, line = self._sites.of_frame(sys._getframe(2))
        row = self._found((schema.operation, kind, dtype, site), line)
        row.count += 1
        row.allocations += len(fresh)
        row.allocated_bytes += sum(t.untyped_storage().nbytes() for t in fresh.values())
        if kind == "collective":
            row.bytes += max(_bytes(outputs), _bytes(read), _bytes(written))
            self._issued(result)
        elif kind == "fill":
            row.bytes += _bytes(written or outputs)
        elif kind != "view":
            row.bytes += _bytes(read) + _bytes(written) + _bytes(list(fresh.values()))
        self._products += schema.product

    def _schema(self, func: Any) -> _Schema:
        namespace, name = func.namespace, func._opname
        arguments = enumerate(func._schema.arguments)
        written = {
            i for i, argument in arguments if argument.alias_info and argument.alias_info.is_write
        }
        kind: Kind = "compute"
        if namespace in ("c10d", "_c10d_functional"):
            kind = "collective"
        elif name in _FILLS:
            kind = "fill"
        elif name in _COPIES or name.endswith(_COPIES_ELSEWHERE):
            kind = "copy"
        elif func.is_view:
            kind = "view"
        product = name in _PRODUCTS or "attention" in name or "convolution" in name
        schema = _Schema(f"{namespace}.{name}", kind, frozenset(written), product)
        self._schemas[func] = schema
        return schema

    def _issued(self, result: Any) -> None:
        """Remember the work objects of a collective; alive, they keep their identity."""
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.ScriptObject):
                work = dist.Work.unbox(item)
                self._works[id(work)] = (work, self._products)

    def _waited(self, work: Any, frame: FrameType) -> None:
        site, line = self._sites.of_frame(frame)
        row = self._found(("Work.wait", "wait", "", site), line)
        row.count += 1
        issued = self._works.pop(id(work), None)
        row.exposed += issued is not None and issued[1] == self._products

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._active:
            sys.setprofile(None)
        elif not self._local.inside and frame.f_code.co_filename != _HERE:
            if event == "call":
                self._called(frame)
            elif event == "c_call":
                self._called_c(frame, argument)
            elif event == "c_return" and argument.__name__ == "resize_":
                self._resized(frame, argument.__self__)

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> _Tracer | None:
        """Hears of every function that is entered; what it returns hears of each of its lines."""
        if not self._active:
            sys.settrace(None)
            return None
        code = frame.f_code
        if code not in self._tracers:
            site = self._sites.of_code(code)
            tracer = None if site is None or not is_of_engine(site) else self._tracer(site, code)
            self._tracers[code] = tracer
        return self._tracers[code]

    def _tracer(self, site: str, code: CodeType) -> _Tracer:
        amounts = self._found(("python line", "python_line", "", site), code.co_firstlineno)

        def count(_frame: FrameType, event: str, _argument: Any) -> _Tracer:
            if event == "line":
                amounts.count += 1
            return count

        return count

    def _called(self, frame: FrameType) -> None:
        site, line = self._sites.of_frame(frame)
        if is_of_engine(site):
            self._found(("python call", "python_call", "", site), line).count += 1

    def _called_c(self, frame: FrameType, function: Any) -> None:
        name = function.__name__
        if name in _BLOCKING:
            site, line = self._sites.of_frame(frame)
            self._found((name, "wait", "", site), line).count += 1
        elif name == "resize_" and isinstance(function.__self__, torch.UntypedStorage):
            self._local.before_bytes = function.__self__.nbytes()
        elif name in _PYTHON_READS and _is_on_host(function.__self__):
            site, line = self._sites.of_frame(frame)
            self._found((f"Tensor.{name}", "host_read", "", site), line).count += 1
        caller = self._sites.of_code(frame.f_code)
        if caller is not None and is_of_engine(caller):
            self._found(("python call", "python_call", "", caller), frame.f_lineno).count += 1

    def _resized(self, frame: FrameType, storage: Any) -> None:
        if not isinstance(storage, torch.UntypedStorage):
            return
        site, line = self._sites.of_frame(frame)
        row = self._found(("storage.resize_", "resize", "", site), line)
        row.count += 1
        if storage.nbytes() > self._local.before_bytes:
            row.allocations += 1
            row.allocated_bytes += storage.nbytes()

    def _found(self, key: _Key, line: int) -> _Amounts:
        if key not in self._amounts:
            self._amounts[key] = _Amounts()
            self._amounts[key].line = line
        return self._amounts[key]


def _eager() -> AbstractContextManager[object]:
    """What torch.compile runs is run without it: its compiler would trace the counter, and fail."""
    loaded = "torch._dynamo" in sys.modules  # else nothing is compiled, and loading it takes long
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def varying(before: Sequence[CountRow], other: Sequence[CountRow]) -> list[str]:
    """Names of rows that two counts of the same step disagree about."""
    amounts = [
        Counter(tuple(row.model_dump(exclude={"line"}).values()) for row in rows)
        for rows in (before, other)
    ]
    differing = (amounts[0] - amounts[1]) + (amounts[1] - amounts[0])
    return sorted({f"{key[0]} {key[2]}".rstrip() + f" at {key[3]}" for key in differing})


def dispatches(kind: type) -> bool:
    """Whether a class of tensors turns operations into others."""
    own = getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl
    return issubclass(kind, Tensor) and own and not issubclass(kind, FakeTensor)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _is_read(
    schema: _Schema, read: Sequence[Tensor], results: Sequence[Tensor], frame: FrameType
) -> bool:
    """Whether the host has to wait for what is on the device."""
    if schema.operation.removeprefix("aten.") in _READS:
        counts_steps = frame.f_code.co_filename.startswith(_OPTIMIZERS)
        return not (counts_steps and all(map(_is_on_host, read)))
    moves = schema.kind == "copy" and any(map(_is_on_host, results))
    return moves and not all(map(_is_on_host, read))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtype(kind: Kind, read: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Kind, str]:
    """The dtype of a row; a copy between two dtypes is a cast."""
    after = str((results or read)[0].dtype).removeprefix("torch.") if results or read else ""
    if kind == "copy" and read:
        before = str(read[0].dtype).removeprefix("torch.")
        if before != after:
            return "cast", f"{before}>{after}"
    return kind, after
