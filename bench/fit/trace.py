"""One step of one rank on tensors without data: storages that come and go, and collectives."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.engines.dtypes import local_tensor
from bench.engines.protocol import Engine
from bench.engines.registry import build_engine
from bench.errors import BenchError, UnsupportedError, UsageError
from bench.fit.dataless import Dataless, tensors_without_data
from bench.fit.transformer_engine_layers import layers_as_storages
from bench.models import initial_values
from bench.models.build import run_model
from bench.models.initial_values import chunks
from bench.models.sharding import units
from bench.spec import ResolvedRun, known_engine
from mfsdp_core.plan.buffers import CATEGORY_OF_ROLE

#: First, any other and last microbatch of a step; more are like the second.
MICROBATCHES: Final = 3
#: The first makes the optimizer's state; the second is like any later one.
_STEPS: Final = 2
SETUP: Final = "setup"

#: Who has made a storage, by the end of the innermost file on the stack that is listed.
_FILES: Final = (
    ("mfsdp_core/memory/allocators.py", "role"),
    ("mfsdp_core/memory/pools.py", "pools"),
    ("mfsdp_core/comm/", "communication"),
    ("_fully_shard/_fsdp_param.py", "main_weights"),
    ("_fully_shard/_fsdp_collectives.py", "communication"),
    ("bench/engines/counted_collectives.py", "communication"),
    ("torch/nn/parallel/distributed.py", "gradients"),
    ("ddp_comm_hooks/", "communication"),
    ("torch/optim/", "optimizer"),
    ("bench/engines/precision_aware_adamw.py", "optimizer"),
    ("torch/utils/checkpoint.py", "activations"),
    ("bench/models/initial_values.py", "temporaries"),
    ("bench/models/initialisation.py", "main_weights"),
    ("bench/models/", "activations"),
)
#: What is in host memory, which is no category of a device's.
HOST: Final = "host"
CATEGORIES: Final = (
    "main_weights",
    "compute_weights",
    "gathered_weights",
    "gradients",
    "optimizer_state",
    "pools",
    "communication",
    "activations",
    "logits_and_loss",
    "temporaries",
)


class Moment(NamedTuple):
    """A part of a step. microbatch: from 0; None outside of them. unit: from 0; None is the root.

    phase: setup, forward, loss, backward, clip, update.
    """

    phase: str
    microbatch: int | None = None
    unit: int | None = None


class Message(NamedTuple):
    """A collective, or one message. bytes: of the whole buffer, as for an all-gather's output."""

    operation: str
    axis: str
    bytes: int


class Kind(NamedTuple):
    """What a storage is. contents: its first tensor, as `bfloat16[4096, 1024]`."""

    category: str
    contents: str


@dataclass
class Trace:
    """changes: (storage, bytes, index of the moment), from before the model is built.

    first: index of the first moment of the recorded step. messages: of that step, with the
    microbatch. wire_bytes: that the engine says it has sent in it, and in its second microbatch.
    """

    units: int
    moments: list[Moment] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    messages: list[tuple[Message, int | None]] = field(default_factory=list)
    first: int = 0
    wire_bytes: tuple[int, int] | None = None


def trace(resolved: ResolvedRun) -> Trace:
    """The second step of rank 0 of `resolved`, whose model is traced unchanged.

    Raises:
        UnsupportedError: the engine or the model needs contents, hardware, or more address space.
        UsageError: a process group exists already.
    """
    _check(resolved)
    recorder = _Recorder(_unregistered(resolved))
    try:
        with (
            _ranks(resolved),
            nullcontext() if resolved.linear.kind == "torch" else layers_as_storages(),
            tensors_without_data(recorder.changed, recorder.communicated) as mode,
        ):
            recorder.run(mode)
    except BenchError:
        raise
    except Exception as error:  # whatever an engine or a library of it asks of a device
        text = str(error).partition("\n")[0]
        raise UnsupportedError(
            "fit-trace", f"it cannot be traced without a device: {type(error).__name__}: {text}"
        ) from error
    return recorder.trace


def _unregistered(resolved: ResolvedRun) -> ResolvedRun:
    """The run without NCCL's registration, which takes the same buffers from memory of its own."""
    settings = resolved.engine.settings
    known = {"nccl_ub", "manual_registration"} & type(settings).model_fields.keys()
    off = settings.model_copy(update=dict.fromkeys(known, False))
    return resolved.model_copy(
        update={"engine": resolved.engine.model_copy(update={"settings": off})}
    )


def _check(resolved: ResolvedRun) -> None:
    if resolved.engine.setting("cuda_graph"):
        raise UnsupportedError(
            "fit-graph", "a captured step keeps memory of its own, which nobody predicts"
        )
    if known_engine(resolved.engine.name).name not in {"single", "ddp", "fsdp2", "mfsdp"}:
        raise UnsupportedError(
            "fit-engine", f"{resolved.engine.name} was never traced without contents"
        )


@contextmanager
def _ranks(resolved: ResolvedRun) -> Iterator[None]:
    """This process as rank 0 of all ranks, none of which is there."""
    if dist.is_initialized():
        raise UsageError("fit needs a process without a process group: run it in one of its own")
    if known_engine(resolved.engine.name).one_process:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=resolved.launch.ranks, store=FakeStore())
    # Which transport is taken is decided by the backend that a run would have.
    named = "gloo" if resolved.launch.device == "cpu" else "fake"
    try:
        with mock.patch.object(dist, "get_backend", return_value=named):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _drawing_once(device: str) -> Iterator[None]:
    """Draw as much at once as `device` does, and of every size once: integers are computed here."""
    drawn: set[torch.Size] = set()

    def first(rows: Tensor, begin: int, stride: int) -> Iterator[tuple[Tensor, int]]:
        for part, start in itertools.islice(chunks(rows, begin, stride, device), 1):
            if part.shape not in drawn:
                drawn.add(part.shape)
                yield part, start

    with mock.patch.object(initial_values, "chunks", first):
        yield


class _Recorder:
    """Writes a `Trace` while the engine runs."""

    def __init__(self, resolved: ResolvedRun) -> None:
        count = min(resolved.microbatches, MICROBATCHES)
        self._run = resolved.model_copy(update={"microbatches": count})
        self._microbatch: int | None = None
        self._in_step = False
        self._shapes: set[torch.Size] = set()
        self.trace = Trace(units=0)
        shape = resolved.shape
        vocab = 0 if shape is None else shape.vocab
        self._vocab = (vocab, vocab // resolved.engine.tensor_parallel)
        self._mark(SETUP)

    def changed(self, number: int, change: int, operation: str, tensor: Tensor | None) -> None:
        """A storage has grown or shrunk; called by the dispatcher."""
        del operation
        if tensor is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            contents = f"{dtype}{list(tensor.shape)}"
            self.trace.kinds[number] = Kind(self._category(tensor), contents)
        if change:
            self.trace.changes.append((number, change, len(self.trace.moments) - 1))

    def communicated(self, operation: str, group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
        """A collective of the recorded step."""
        if self._in_step and group.size() > 1:
            axis = {"default_pg": "world"}.get(group.group_desc, group.group_desc)
            size = max(tensor.nbytes for tensor in tensors)
            message = Message(operation, axis.removeprefix("mesh_"), size)
            self.trace.messages.append((message, self._microbatch))

    def run(self, mode: Dataless) -> None:
        """Set-up and two steps."""
        device = torch.device("cpu")
        model, make_batch = run_model(self._run, device)
        self._shapes = {p.shape for p in model.parameters() if p.dim() > 1}
        self._watch(model)
        with _drawing_once(self._run.launch.device):
            engine = build_engine(model, self._run, device)
        if self._run.launch.device == "cuda":
            _step_as_on_cuda(engine)
        for step in range(_STEPS):
            self._in_step = step == _STEPS - 1
            if self._in_step:
                self.trace.first = len(self.trace.moments)
            before = engine.wire_bytes()
            between = self._step(engine, mode, make_batch)
            after = engine.wire_bytes()
            if after is not None and before is not None:
                self.trace.wire_bytes = (after - before, between)
        self._settle(mode, engine)
        getattr(engine, "close", lambda: None)()

    def _step(self, engine: Engine, mode: Dataless, make_batch: Callable[..., Any] | None) -> int:
        """Returns the bytes that the second microbatch has sent."""
        train, count = self._run.train, self._run.microbatches
        between = 0
        engine.set_learning_rate(train.lr)
        for index in range(count):
            self._microbatch = index
            self._mark("forward")
            if make_batch is not None:
                tokens, targets = make_batch(range(train.micro_batch))
            else:
                tokens, targets = torch.zeros(
                    (2, train.micro_batch, train.seq_len), dtype=torch.int64
                )
            before = engine.wire_bytes() or 0
            engine.forward_backward(tokens, targets, 1 / count, index == count - 1)
            if index == 1:
                between = (engine.wire_bytes() or 0) - before
        self._microbatch = None
        held = [p.grad for p in getattr(engine, "parameters", ()) if p.grad is not None]
        self._name(mode, held, "gradients")
        if train.clip_norm is not None:
            self._mark("clip")
            engine.clip_grad_norm(train.clip_norm)
        self._mark("update")
        engine.optimizer_step()
        engine.zero_grad()
        return between

    def _watch(self, model: nn.Module) -> None:
        """Know when units run, and when their backward passes begin."""
        modules = units(model)
        self.trace.units = len(modules)

        def begins(index: int) -> Callable[..., None]:
            def before(*_: object) -> None:
                self._mark("forward", index)

            return before

        def ends(index: int) -> Callable[..., None]:
            def gradient(_: Tensor) -> None:
                self._mark("backward", index)

            def after(_module: nn.Module, _inputs: object, output: Any) -> None:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(gradient)
                if index == len(modules) - 1:
                    self._mark("loss")

            return after

        for index, unit in enumerate(modules):
            unit.register_forward_pre_hook(begins(index))
            unit.register_forward_hook(ends(index))

    def _mark(self, phase: str, unit: int | None = None) -> None:
        self.trace.moments.append(Moment(phase, self._microbatch, unit))

    def _category(self, tensor: Tensor) -> str:
        phase = self.trace.moments[-1].phase
        if phase in {"loss", "backward"} and self._is_of_logits(tensor):
            return "logits_and_loss"
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            maker = _maker(frame.f_code.co_filename)
            if maker == "role":
                buffer = frame.f_locals.get("buffer")
                if buffer is not None and buffer.row.where == "host":
                    return HOST
                if buffer is not None:
                    booked = CATEGORY_OF_ROLE[buffer.row.role]
                    return "communication" if booked == "communication_buffers" else booked
            elif maker is not None and not (maker == "activations" and phase == SETUP):
                return maker
            frame = frame.f_back
        if phase == "backward" and tensor.shape in self._shapes:
            return "gradients"
        return "activations" if phase in {"forward", "loss"} else "temporaries"

    def _is_of_logits(self, tensor: Tensor) -> bool:
        """[tokens of a part of the loss, vocabulary], whole or a rank's part of the vocabulary."""
        tokens = self._run.train.micro_batch * self._run.train.seq_len
        width = tensor.shape[-1] if tensor.dim() > 1 else 0
        most = -(-tokens // self._run.loss_chunks)
        rows = {most, tokens % most or most}
        return width in self._vocab and tensor.numel() in {width * part for part in rows}

    def _name(self, mode: Dataless, tensors: Sequence[Tensor], category: str) -> None:
        for tensor in tensors:
            number = mode.number_of(local_tensor(tensor))
            known = None if number is None else self.trace.kinds[number]
            if number is not None and known is not None and known.category != HOST:
                self.trace.kinds[number] = known._replace(category=category)

    def _settle(self, mode: Dataless, engine: Engine) -> None:
        """What only the whole step tells: state lasts, and gathered weights go."""
        self._name(mode, list(getattr(engine, "parameters", ())), "main_weights")
        shrunk = {number for number, change, at in self.trace.changes if change < 0 and at}
        offloads, is_torchs = self._run.engine.setting("offload"), self._run.engine.name == "fsdp2"
        for number, kind in self.trace.kinds.items():
            category = kind.category
            if category == "optimizer":
                category = "temporaries" if number in shrunk else "optimizer_state"
                category = HOST if offloads else category
            elif category in {"compute_weights", "main_weights"} and number in shrunk:
                category = "gathered_weights"
            elif offloads and is_torchs and category in {"gradients", "main_weights"}:
                category = HOST
            self.trace.kinds[number] = kind._replace(category=category)


@cache
def _maker(file: str) -> str | None:
    return next((what for end, what in _FILES if end in file), None)


def _step_as_on_cuda(engine: Engine) -> None:
    """There torch steps plain tensors all at once, with temporaries of the size of all of them."""
    optimizer = getattr(engine, "optimizer", getattr(engine, "_optimizer", None))
    is_plain = not hasattr(engine, "optimizer") or all(
        type(p) is nn.Parameter for p in engine.optimizer.param_groups[0]["params"]
    )
    for group in getattr(optimizer, "param_groups", ()):
        if is_plain and "foreach" in group and not group.get("fused"):
            group["foreach"] = True
