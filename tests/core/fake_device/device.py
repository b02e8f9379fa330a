"""CUDA devices without memory: what is on one is a fake tensor, and what is on the host is real.

Operations, autograd and its threads for devices are torch's. Streams and events order nothing: the
late device is for that. The host reads ones from a device. Every read and every copy between host
and device is counted, and refused during a capture, as is what a replay would not do again.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from late.operations import LocalOperations, host_reads
from mfsdp_core.comm import symmetric
from mfsdp_core.streams import CudaStreams

_ROOT = Path(__file__).parents[3]
_OWN = tuple(f"{_ROOT / name}/" for name in ("mfsdp_core", "bench"))
#: Between the addresses of two storages; no storage is that long.
_APART = 2**48


class CaptureError(RuntimeError):
    """What CUDA refuses during a capture, or what a replay would not do again."""


class FakeCuda(LocalOperations):
    """While it is active there are eight devices.

    traffic: "what: operation in function" -> times. threads: -> operations on a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic: Counter[str] = Counter()
        self.threads: Counter[int] = Counter()
        self.graph: FakeGraph | None = None
        self.pool: FakePool | None = None
        self._pinned: dict[int, Any] = {}
        self._fake = FakeTensorMode()
        self._stack = ExitStack()

    def __enter__(self) -> FakeCuda:
        for owner, name, twin in _twins(self):
            self._stack.enter_context(patch.object(owner, name, twin, create=True))
        # Or `torch.tensor` makes what it copies to a device past all modes.
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for shapes
        name = func._schema.name.removeprefix("aten::")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        fakes = [one for one in tensors if isinstance(one, FakeTensor)]
        if fakes and host_reads(func, args, kwargs):
            return self._read(name, args[0])
        target = kwargs.get("device") or (fakes[0].device if fakes else "cpu")
        is_write = name == "copy_" and not isinstance(args[0], FakeTensor)
        if is_write or torch.device(target).type != "cuda":
            return self._on_host(func, args, kwargs, fakes)
        return self._on_device(func, args, kwargs, tensors)

    def note(self, what: str, operation: str) -> None:
        """Count it; during a capture refuse it."""
        found = f"{what}: {operation} in {_caller()}"
        self.traffic[found] += 1
        if self.graph is not None:
            raise CaptureError(found)

    def _read(self, name: str, tensor: Tensor) -> Any:
        self.note("read by the host", name)
        if name == "equal":
            return True
        if name == "_local_scalar_dense":
            return torch.ones((), dtype=tensor.dtype).item()
        if name == "nonzero":  # asked of what is wrong
            return torch.zeros((0, tensor.dim()), dtype=torch.int64)
        raise NotImplementedError(f"{name} of a tensor without data")

    def _on_host(self, func: Any, args: Any, kwargs: Any, fakes: list[FakeTensor]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if fakes and torch.device(kwargs.get("device") or "cpu").type == "meta":
            return torch.empty_like(fakes[0], **{"dtype": fakes[0].dtype} | kwargs)
        if fakes:
            self.note("to the host", name)
            dtype = kwargs.get("dtype") or fakes[0].dtype
            return args[0] if name == "copy_" else torch.ones(fakes[0].shape, dtype=dtype)
        if self.graph is not None and torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"{name} draws on the host, in {_caller()}")
        is_pinned = kwargs.pop("pin_memory", None) or name == "_pin_memory"
        made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        if is_pinned:
            self._pinned[made.untyped_storage()._cdata] = made.untyped_storage()
        return made

    def _on_device(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        fakes = [one for one in tensors if isinstance(one, FakeTensor)]
        hosts = [one for one in tensors if one.device.type == "cpu"]
        name = func._schema.name.removeprefix("aten::")
        if any(one.dim() for one in hosts) or (hosts and name in {"_to_copy", "copy_"}):
            pinned = all(one.untyped_storage()._cdata in self._pinned for one in hosts)
            without_waiting = kwargs.get("non_blocking") or args[2:3] == (True,)
            kind = "pinned memory" if pinned and without_waiting else "pageable memory"
            self.note(f"from {kind}", name)
        elif hosts and self.graph is not None:
            raise CaptureError(f"{name} reads a number of the host's memory, in {_caller()}")
        self.threads[threading.get_ident()] += 1
        if len(fakes) < len(tensors):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        with self._fake:
            made = func(*args, **kwargs)
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        before = {one.untyped_storage()._cdata for one in fakes}
        new = [one for one in results if one.untyped_storage()._cdata not in before]
        if self.graph is not None:
            self.graph.note(fakes, new)
        if self.pool is not None:
            self.pool.made += [one.untyped_storage() for one in new]
        return made

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


class FakeGraph:
    """`torch.cuda.CUDAGraph`: what memory its replays use, and which of it is the graph's own."""

    def __init__(self) -> None:
        # A weak reference keeps the number of a storage from being given to another.
        self._used: dict[int, StorageWeakRef] = {}
        self._own: set[int] = set()

    def note(self, used: list[Any], made: list[Any]) -> None:
        self._own |= {one.untyped_storage()._cdata for one in made} - set(self._used)
        for storage in (one.untyped_storage() for one in (*used, *made)):
            if storage.nbytes():
                self._used.setdefault(storage._cdata, StorageWeakRef(storage))

    def replay(self) -> None:
        for number, reference in self._used.items():
            if number in self._own:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None or not storage.nbytes():
                raise CaptureError("a replay uses memory that was given back since the capture")


class FakePool:
    """`torch.cuda.MemPool`: every allocation is a segment."""

    def __init__(self, _allocator: Any, *, no_split: bool) -> None:
        assert no_split
        self.made: list[Any] = []

    def snapshot(self) -> list[dict[str, int]]:
        return [{"address": one._cdata * _APART, "total_size": one.nbytes()} for one in self.made]


class _Stream:
    """Stream and event: nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: _Stream) -> None: ...

    def wait_event(self, _: _Stream) -> None: ...

    def elapsed_time(self, _: _Stream) -> float:
        return 1.0


class _Backend:
    """Of a process group with NCCL's allocator."""

    mem_allocator = "NCCL's"

    def register_mem_pool(self, _: Any, symm: bool = False) -> None: ...

    def deregister_mem_pool(self, _: Any) -> None: ...


def _twins(cuda: FakeCuda) -> list[tuple[Any, str, Any]]:
    """All that stands for a driver."""
    plain_address, current = Tensor.data_ptr, _Stream()

    def address(tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return plain_address(tensor)
        start = tensor.storage_offset() * tensor.element_size()
        return tensor.untyped_storage()._cdata * _APART + start

    @contextmanager
    def capture(graph: FakeGraph, **_: Any) -> Iterator[None]:
        cuda.graph = graph
        try:
            yield
        finally:
            cuda.graph = None

    @contextmanager
    def allocate_in(pool: FakePool, _device: torch.device) -> Iterator[None]:
        if cuda.graph is not None:
            raise CaptureError(f"memory of a pool is allocated, in {_caller()}")
        before, cuda.pool = cuda.pool, pool
        try:
            yield
        finally:
            cuda.pool = before

    answers: dict[str, Any] = {
        "_lazy_init": None,
        "current_device": 0,
        "device_count": 8,
        "empty_cache": None,
        "get_device_properties": SimpleNamespace(name="fake", uuid="0"),
        "is_available": True,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "stream": nullcontext(),
        "current_stream": current,
    }
    return [
        *((torch.cuda, name, lambda *_, value=value: value) for name, value in answers.items()),
        (torch.cuda, "is_current_stream_capturing", lambda: cuda.graph is not None),
        (torch.cuda, "synchronize", lambda *_: cuda.note("waited for by the host", "synchronize")),
        (torch.cuda, "memory_stats", lambda _: Counter()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "CUDAGraph", FakeGraph),
        (torch.cuda, "graph", capture),
        (torch.cuda, "MemPool", FakePool),
        (torch.cuda, "use_mem_pool", allocate_in),
        (torch.backends.cuda, "is_built", lambda: True),
        (CudaStreams, "registrar", lambda *_: _Backend()),
        (symmetric, "from_all", lambda _group, value: [value]),
        (Tensor, "data_ptr", address),
    ]


def _caller() -> str:
    """The innermost function of the core or of the benchmark that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            return f"{Path(file).relative_to(_ROOT)}: {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "a test"
