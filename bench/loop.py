"""The training loop of one rank: microbatches, clipping, learning rate, update, samples.

The clock of a step starts before its first microbatch is drawn and stops when its loss has reached
the host. That read is the only point at which the loop waits for the device; it lies behind the
optimizer step in the queue, so it closes the step on the device as well, and costs one round trip
of a few bytes per step. Before it, while the device computes, the host makes the microbatches of
the next step. Meters run after the clock has stopped; what they cost is measured too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from bench.data.batches import Batches
from bench.engines.protocol import Engine
from bench.errors import BenchError
from bench.meters.cpu_time import CpuMeter, spent
from bench.meters.device_state import DeviceState
from bench.meters.memory import MemoryMeter
from bench.meters.phases import PhaseMeter
from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.spec import ResolvedRun, TrainSpec

_STEPS_WITH_A_NORM = 2
"""Without clipping, so many first steps measure the norm: their times never count."""


class NonFiniteLossError(BenchError):
    """The loss or the gradient norm is NaN or infinite: no later number means anything."""


def learning_rate(train: TrainSpec, step: int) -> float:
    """Linear warm-up: lr * step / warmup_steps until it reaches lr; `step` counts from 1."""
    if step >= train.warmup_steps:
        return train.lr
    return train.lr * step / train.warmup_steps


@dataclass(frozen=True)
class StepOutcome:
    """What one step gave back to the host."""

    milliseconds: float
    loss: float
    grad_norm: float | None
    learning_rate: float


@dataclass
class MeterCost:
    """What measuring costs: seconds spent in each meter, and in the steps; all of this rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    steps: int = 0

    @contextmanager
    def timed(self, meter: str) -> Iterator[None]:
        """Add the time of the block to `meter`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[meter] = self.seconds.get(meter, 0.0) + perf_counter() - start

    def add_step(self, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.step_seconds += seconds

    @property
    def fraction(self) -> float:
        """Seconds in all meters over seconds in all steps; 0 before the first step."""
        return sum(self.seconds.values()) / self.step_seconds if self.step_seconds else 0.0


class StepMeter(Protocol):
    """Who hears when a step is over."""

    def after_step(self, step: int) -> None:
        """`step` (from 1) is, outside the clock."""


class PhaseListener(Protocol):
    """Who hears when the parts of a step begin."""

    def on_phase(self, name: str) -> None:
        """One does: `microbatch N` (from 1), `clip` or `update`."""


class TrainingLoop:
    """Runs the steps of `resolved` on this rank; `listeners` hear of the parts of each."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        resolved: ResolvedRun,
        *,
        device: torch.device,
        sink: SampleSink,
        listeners: Sequence[PhaseListener] = (),
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._train = resolved.train
        self._microbatches = resolved.microbatches
        # Ranks of one tensor parallel group see the same tokens: each counts its share of them.
        self._tokens = resolved.tokens_per_step // resolved.launch.ranks
        self._memory = MemoryMeter(device)
        self.setup_peaks: dict[str, int] | None = None
        self._cpu = CpuMeter()
        self._sink = sink
        self._listeners = listeners
        self._wire_bytes = 0
        self._step = 0
        self.phases = PhaseMeter.of(device)
        self.device_state = DeviceState.of(device)
        self.cost = MeterCost()
        capture = getattr(engine, "captured", None)
        # Weakly: a graph must be gone, without the garbage collector, before its process group.
        own: TrainingLoop = weakref.proxy(self)

        def enqueue(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            return own._enqueue_given(*tensors)

        self.captured = capture and capture(enqueue)

    def run(self, meters: Iterable[StepMeter] = ()) -> MeterCost:
        """All steps; `meters` hear of each.

        Raises:
            NonFiniteLossError: at the first step whose loss or gradient norm is not finite; its
                sample is not written, because JSON has no NaN.
        """
        self.setup_peaks, meters = self._memory.end_setup(), tuple(meters)
        for step in range(1, self._train.steps + 1):
            with self.cost.timed("cpu"):
                before = self._cpu.read()
            outcome = self.step(step)
            with self.cost.timed("cpu"):
                cpu = spent(before, self._cpu.read())
            self.cost.add_step(outcome.milliseconds / 1e3)
            _check_finite(step, outcome)
            self._record(step, outcome, cpu)
            for meter in meters:
                meter.after_step(step)
        return self.cost

    def step(self, step: int) -> StepOutcome:
        """One optimizer step (from 1), without its meters."""
        self._step = step
        start = perf_counter()
        self.phases.begin()
        lr = learning_rate(self._train, step)
        self._engine.set_learning_rate(lr)
        loss, norm = self._iterate(step - 1)
        if step < self._train.steps:
            self.phases.mark("data")
            self._batches.prepare(step, self._microbatches)
        self.phases.end()
        loss_value, norm_value = _to_host(loss, norm)
        return StepOutcome((perf_counter() - start) * 1e3, loss_value, norm_value, lr)

    def _iterate(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Everything that is enqueued for a step: its loss and the norm of its gradient."""
        if self.captured is None:
            return self._enqueue(self._drawn(step))
        inputs = [tensor for pair in self._drawn(step) for tensor in pair]
        self.phases.mark("graph")
        with self.phases.paused():
            outputs: tuple[Tensor, Tensor | None] = self.captured(*inputs)
        return outputs

    def _drawn(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Microbatches, each when it is needed."""
        for index in range(self._microbatches):
            self.phases.mark("data")
            yield self._batches.microbatch(step, index)

    def _enqueue_given(self, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._enqueue(zip(tensors[::2], tensors[1::2], strict=True))

    def _enqueue(
        self, microbatches: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        engine = self._engine
        loss = self._accumulate(microbatches)
        norm = None
        if self._train.clip_norm is not None:
            self._mark("clip")
            norm = engine.clip_grad_norm(self._train.clip_norm)
        elif self._step <= _STEPS_WITH_A_NORM:
            norm = engine.clip_grad_norm(math.inf)
        self._mark("update")
        engine.optimizer_step()
        engine.zero_grad()
        return loss, norm

    def _mark(self, part: str, number: str = "") -> None:
        """Phases add up the parts of one name."""
        self.phases.mark(part)
        for listener in self._listeners:
            listener.on_phase(part + number)

    def _accumulate(self, microbatches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Forward and backward of all microbatches; the mean of their losses."""
        count = self._microbatches
        total: Tensor | None = None
        for index, (tokens, targets) in enumerate(microbatches):
            self._mark("microbatch", f" {index + 1}")
            loss = self._engine.forward_backward(tokens, targets, 1 / count, index == count - 1)
            total = loss if total is None else total + loss
        if total is None:
            raise ValueError("a step needs at least one microbatch")
        return total if count == 1 else total / count

    def _record(self, step: int, outcome: StepOutcome, cpu: dict[str, float] | None) -> None:
        with self.cost.timed("wire"):
            sent = self._engine.wire_bytes()
            wire = None if sent is None else sent - self._wire_bytes
            self._wire_bytes = sent or 0
        with self.cost.timed("memory"):
            rss, device_peak = self._memory.rss_bytes(), self._memory.device_peak_bytes()
            device = self._memory.device_allocator()
        with self.cost.timed("device"):
            phases = self.phases.milliseconds()
            if device is not None and self.device_state is not None:
                device |= self.device_state.after_step() or {}
        sample = StepSample(
            step=step,
            milliseconds=outcome.milliseconds,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            tokens=self._tokens,
            wire_bytes=wire,
            rss_bytes=rss,
            device_peak_bytes=device_peak,
            cpu_milliseconds=cpu,
            phase_milliseconds=phases,
            host_milliseconds=self.phases.host_milliseconds,
            device=device,
        )
        with self.cost.timed("samples"):
            self._sink.append(sample)


def _to_host(loss: Tensor, norm: Tensor | None) -> tuple[float, float | None]:
    """Both scalars in one transfer, which waits for the device."""
    if norm is None:
        return loss.item(), None
    loss_value, norm_value = torch.stack((loss.double(), norm.double())).tolist()
    return loss_value, norm_value


def _check_finite(step: int, outcome: StepOutcome) -> None:
    if not math.isfinite(outcome.loss):
        raise NonFiniteLossError(f"step {step}: the loss is {outcome.loss}")
    if outcome.grad_norm is not None and not math.isfinite(outcome.grad_norm):
        raise NonFiniteLossError(
            f"step {step}: the gradient norm is {outcome.grad_norm} (loss {outcome.loss:.6g})"
        )
