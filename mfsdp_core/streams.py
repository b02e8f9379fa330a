"""The device as the core uses it: its memory, its streams, and what is under way on them.

One object per model; the only module that calls `torch.cuda`. On a CPU it does nothing.

[Note: stream order] The core enqueues what it computes on the stream that is current when it is
called (copies into buckets, landings). A collective runs on a stream of its group, from what was
enqueued before it was issued until somebody waits:

1. What a collective reads is not written, and what it writes is neither read nor written, between
   its issue and the wait for it.
2. Memory is given back, to the allocator or to a pool, after the wait for what uses it.
3. Every collective is waited for, and its tensors are referenced until then.

A landing is therefore deferred to where its result is needed, instead of running on a side stream.

[Note: copy-in stream] Gathers are the exception: on CUDA the casts into what they send, and the
gathers themselves, are on a stream next to the current one, as under FSDP2. So neither do casts
delay what computes now, nor do gathers wait for it. That stream comes behind the current one

4. where a pass begins, outside of which main weights change, and buffers that stay are read;
5. where the memory of gathered weights is given back, which is that stream's own: what it gathers
   there next is behind the last use.

Whoever waits for a gather waits for what the copy-in stream did for it. Fresh memory of the
allocator `temporary` belongs to the current stream, since autograd decides when it goes: there a
gather is behind what was enqueued before it, and only its casts run meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from mfsdp_core.errors import ConfigurationError


class Work(Protocol):
    """A collective as torch hands it over."""

    def wait(self) -> object:
        """Let the current stream wait for its end."""


class Observer(Protocol):
    """Whoever wants to know of collectives."""

    def issued(self, name: str) -> int:
        """A collective starts, behind what the current stream has; its number."""

    def waited(self, number: int) -> None:
        """The current stream waits for the collective of this number."""


class InFlight:
    """What can be waited for: works, with the tensors to hold until then."""

    __slots__ = ("_number", "_observer", "_tensors", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[torch.Tensor],
        observer: Observer | None,
        number: int,
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._observer = observer
        self._number = number

    def wait(self) -> torch.Tensor:
        """Let the current stream wait for the end of all of them; on a CPU return afterwards.

        The result is the last of the tensors. To be waited for once.
        """
        for work in self._works:
            work.wait()
        result = self._tensors[-1]
        self._works = self._tensors = ()
        if self._observer is not None:
            self._observer.waited(self._number)
            self._observer = None
        return result


class CopyIn:
    """See [Note: copy-in stream]; before others where blocks of kernels compete, as FSDP2's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Made when it is first used."""
        return torch.cuda.Stream(self._device, priority=-1)

    def running(self) -> AbstractContextManager[object]:
        """What is enqueued, allocated and issued inside the block goes to it."""
        return torch.cuda.stream(self.stream)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """As `running`, behind all that the current stream has."""
        self.follow()
        with self.running():
            yield

    def follow(self) -> None:
        """What it gets from here on comes behind all that the current stream has."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """What the current stream gets from here on comes behind all that this one has."""
        if "stream" in vars(self):
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def mark(self, *, on_host: bool) -> Work:
        """All that it has so far, to wait for, for the host too if it says so. In `running`."""
        return _Recorded(self.stream.record_event(), self._device, on_host)


class _Recorded:
    """An event of a device, whatever device is the current one. on_host: the host waits as well."""

    __slots__ = ("_device", "_event", "_on_host")

    def __init__(self, event: torch.cuda.Event, device: torch.device, on_host: bool) -> None:
        self._event = event
        self._device = device
        self._on_host = on_host

    def wait(self) -> None:
        """Let the device's current stream wait for it."""
        self._event.wait(torch.cuda.current_stream(self._device))
        if self._on_host:
            self._event.synchronize()


class Streams:
    """Those of a device whose operations end in the order in which they are issued: a CPU.

    observer: who hears of collectives, if anybody does.
    check_memory: gets the name and the tensors of every collective, where memory is registered.
    copy_in: where gathers are prepared; None: where everything else is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.observer: Observer | None = None
        self.check_memory: Callable[[str, Sequence[torch.Tensor]], None] | None = None
        self.copy_in: CopyIn | None = None
        self._pool: DevicePool | None = None

    @staticmethod
    def of(device: torch.device) -> Streams:
        """Those of `device`."""
        return CudaStreams(device) if device.type == "cuda" else Streams(device)

    def track(self, works: Sequence[Work], name: str, *tensors: torch.Tensor) -> InFlight:
        """A collective that was issued just now, and the tensors that it reads or writes."""
        if self.check_memory is not None:
            self.check_memory(name, tensors)
        number = 0 if self.observer is None else self.observer.issued(name)
        return InFlight(works, tensors, self.observer, number)

    def ones_but(self, number: int, zeros: Sequence[int]) -> torch.Tensor:
        """`number` bytes on the device, of 1, and of 0 at the indices `zeros`; nobody waits."""
        if not zeros:
            return torch.ones(number, dtype=torch.int8, device=self.device)
        values = torch.ones(number, dtype=torch.int8, pin_memory=self.device.type == "cuda")
        values[torch.tensor(zeros)] = 0
        return values.to(self.device, non_blocking=True)

    def synchronize(self) -> None:
        """Return once the device has done everything."""

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the host computes in and the device copies from and to."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def copied(self) -> Work | None:
        """What the current stream has so far, for the host to wait for; None: it has ended."""
        return None

    def communicated(self) -> AbstractContextManager[None]:
        """Around allocations that collectives read or write, and that stay where they are."""
        return nullcontext() if self._pool is None else self._pool.use()

    def registrar(self, group: Any) -> Any:
        """The backend of a process group, which has an allocator and registers memory of it.

        Raises:
            ConfigurationError: the device has none.
        """
        del group
        raise ConfigurationError(
            f"nccl_ub registers memory of NCCL's allocator; found device {self.device.type}: use "
            "cuda, or leave nccl_ub out."
        )

    def use_pool_of(self, registrar: Any) -> DevicePool:
        """Let `communicated` allocate in a new pool of the registrar's allocator."""
        self._pool = self.new_pool(registrar.mem_allocator)
        return self._pool

    def new_pool(self, allocator: Any) -> DevicePool:
        """A pool of `allocator`."""
        raise NotImplementedError(f"{self.device} has no pools of {allocator}")

    @property
    def has_graphs(self) -> bool:
        """Whether the device can capture what is enqueued."""
        return False

    def expect_captures(self) -> None:
        """Prepare for captures of steps, by `CapturedStep` or by the caller's own graphs."""

    def captured_stream(self) -> AbstractContextManager[None]:
        """Run on the stream that `capture` captures, in order with the current one."""
        return nullcontext()

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture what `step` enqueues: how to replay it, and the memory of its outputs."""
        raise NotImplementedError(f"{self.device} has no graphs")

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Let `observer` hear of collectives inside the block."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before


class CudaStreams(Streams):
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copy_in: CopyIn = CopyIn(device)
        self._captured: torch.cuda.Stream | None = None

    def synchronize(self) -> None:
        """Return once the device has done everything."""
        torch.cuda.synchronize(self.device)

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned, so that copies do not hold up the host."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)

    def copied(self) -> Work:
        """What the current stream has so far, for the host to wait for."""
        event = torch.cuda.current_stream(self.device).record_event()
        return _Recorded(event, self.device, on_host=True)

    @property
    def has_graphs(self) -> bool:
        """Whether the device can capture what is enqueued."""
        return True

    def expect_captures(self) -> None:
        """Let autograd's nodes of before a capture run on its stream, where torch can (2.13)."""
        switch = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
        if switch is not None:
            switch(True)
            return
        warnings.warn(
            f"torch {torch.__version__} has no set_override_stale_capture_stream (2.13 has): a "
            "capture fails where autograd remembers the default stream. Run every step, the first "
            "one too, through CapturedStep, or upgrade torch.",
            RuntimeWarning,
            stacklevel=5,
        )

    @contextmanager
    def captured_stream(self) -> Iterator[None]:
        """Run on the stream that `capture` captures, in order with the current one.

        Autograd runs a node on the stream of its forward pass, and nodes of parameters live on from
        step to step: before torch 2.13 a capture on another stream than that of the steps before
        it fails.
        """
        if self._captured is None:
            self._captured = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self._captured.wait_stream(current)
        with torch.cuda.stream(self._captured):
            yield
        current.wait_stream(self._captured)

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture what `step` enqueues: how to replay it, and the memory of its outputs."""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog, another thread, asks the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, stream=self._captured, capture_error_mode=mode):
            outputs = step()
            self.copy_in.join()  # a capture ends on one stream, behind all others
        return graph.replay, outputs

    def registrar(self, group: Any) -> Any:
        """NCCL's backend of a process group."""
        return group._get_backend(self.device)

    def new_pool(self, allocator: Any) -> DevicePool:
        """A pool of `allocator`."""
        return DevicePool(allocator, self.device)


class DevicePool:
    """Memory of an allocator of one's own. raw: as torch knows it."""

    def __init__(self, allocator: Any, device: torch.device) -> None:
        # A tensor of its own segment has the same offset in its window on all ranks.
        self.raw: Any = torch.cuda.MemPool(allocator, no_split=True)
        self._device = device

    def use(self) -> AbstractContextManager[None]:
        """Allocate in it, on this thread, inside the block."""
        context: AbstractContextManager[None] = torch.cuda.use_mem_pool(self.raw, self._device)
        return context

    def segment_bytes(self) -> list[int]:
        """Sizes of its segments, equal on ranks that have allocated the same."""
        return sorted(end - start for start, end in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """Addresses [start, end) of its segments, by the allocator's own account."""
        segments = ((int(s["address"]), int(s["total_size"])) for s in self.raw.snapshot())
        return [(start, start + size) for start, size in segments]


def current_device(kind: str) -> torch.device:
    """The device of type `kind` that this process computes on."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def default_kind() -> str:
    """The type of device that a process computes on unless it says otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"
