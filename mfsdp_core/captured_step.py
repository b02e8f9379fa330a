"""A whole training step as one CUDA graph: forward, backward, reductions, update.

    call 1, 2     run as they are, on the stream that will be captured
    call 3, 4     run as they are, and are recorded: `replay` compares them, and a step that a graph
                  would not repeat is refused
    call 5        captured, and replayed
    call 6 ...    replayed

On a device without graphs (a CPU) steps are checked as well, and then run as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mfsdp_core.errors import ConfigurationError, LifecycleError, NotReplayableError
from mfsdp_core.events import Event
from mfsdp_core.replay import Recording, differences
from mfsdp_core.wrapper import MegatronFSDP

#: Calls before the first that is recorded: orders are learned, optimizer state is made.
_UNRECORDED = 2
_RECORDED = 2


class CapturedStep:
    """Call it as `step`, with the same number of tensors of the same shapes each time.

    model: built with `cuda_graph_mode=True`. optimizer: over its parameters; its numbers (learning
    rate and others) may change only where they are tensors, so build it with `capturable=True` and
    a learning rate that is a tensor, and leave `zero_grad` within the step. step: takes tensors,
    does everything from the forward pass to `zero_grad`, and returns tensors, which are copied.

    After `optimizer.load_state_dict` the step is captured anew; after anything else that replaces
    memory (parameters, buffers) call `reset`. What a replay does is published as events, as if the
    host had issued it.

    A graph holds NCCL's communicators, and `destroy_process_group` waits for it: drop the step
    first. Nothing here refers back to it, so it goes with its last reference.
    """

    def __init__(
        self, model: MegatronFSDP, optimizer: torch.optim.Optimizer, step: Callable[..., Any]
    ) -> None:
        if not model.cuda_graph_mode:
            raise ConfigurationError(
                "CapturedStep: expected a model built with cuda_graph_mode=True, which keeps "
                "buffers where they are and the host out of a step; found cuda_graph_mode=False."
            )
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._streams = model.streams
        self._inputs: tuple[Tensor, ...] | None = None
        self.reset()
        reset = weakref.WeakMethod(self.reset)

        def capture_anew(_optimizer: torch.optim.Optimizer) -> None:
            forget = reset()
            if forget is not None:
                forget()

        optimizer.register_load_state_dict_post_hook(capture_anew)

    def reset(self) -> None:
        """Forget the graph: the next calls warm up, are checked and captured again."""
        self._finished = 0
        self._recordings: list[Recording] = []
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None
        self._events: list[Event] = []
        self._settings: dict[str, object] = {}

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._replay is not None

    @property
    def is_checked(self) -> bool:
        """Whether two steps were recorded and found to be alike."""
        return len(self._recordings) == _RECORDED

    def __call__(self, *inputs: Tensor) -> Any:
        """One step.

        Raises:
            NotReplayableError: a graph would not repeat what the step does.
            ConfigurationError: other inputs than those of the first call.
            LifecycleError: a number of the optimizer, or the model's mode, has changed since.
        """
        static = self._take(inputs)
        if self.is_checked:
            self._refuse_changes()
        if self._replay is not None:
            self._replay()
            self._publish()
            return _copied(self._outputs)
        if self.is_checked and self._streams.has_graphs:
            return self._capture(static)
        records = self._finished >= _UNRECORDED and not self.is_checked
        try:
            with self._streams.captured_stream():
                outputs = self._recorded(static) if records else self._step(*static)
        except BaseException:
            self.reset()  # what a pass has left behind changes the next one
            raise
        self._finished += 1
        return _copied(outputs)

    def _take(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs, in memory that stays where it is."""
        if self._inputs is None:
            self._inputs = tuple(one.detach().clone() for one in inputs)
            return self._inputs
        found, expected = _described(inputs), _described(self._inputs)
        if found != expected:
            raise ConfigurationError(
                f"CapturedStep: expected inputs {expected}, as at its first call, found {found}. "
                "Pad batches to one shape, or make a CapturedStep for each."
            )
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        return self._inputs

    def _recorded(self, inputs: tuple[Tensor, ...]) -> Any:
        recording = Recording()
        with self._streams.observed(recording), recording.watching():
            outputs = self._step(*inputs)
        self._recordings.append(recording)
        if len(self._recordings) == _RECORDED:
            why = differences(*self._recordings)
            if why:
                raise NotReplayableError(
                    f"the step cannot be a CUDA graph: {'; '.join(why)}. Keep the host out of the "
                    "step, its numbers in tensors and its memory in place, or leave out "
                    "CapturedStep."
                )
            self._settings = self._current_settings()
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> Any:
        with ExitStack() as stack:
            stack.callback(self._model.events.subscribe(self._events.append))
            self._replay, self._outputs = self._streams.capture(lambda: self._step(*inputs))
        self._replay()
        return _copied(self._outputs)

    def _publish(self) -> None:
        bus = self._model.events
        for event in self._events:
            if event.kind in bus.wanted:
                bus.publish(event)

    def _current_settings(self) -> dict[str, object]:
        found: dict[str, object] = {"model.training": self._model.module.training}
        for index, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and not isinstance(value, Tensor):
                    found[f"param_groups[{index}][{name!r}]"] = value
        return found

    def _refuse_changes(self) -> None:
        for name, value in self._current_settings().items():
            before = self._settings.get(name)
            if value != before:
                raise LifecycleError(
                    f"CapturedStep: {name} was {before} when the step was checked, found {value}; "
                    "a graph repeats the former. Make it a tensor, which is read at every replay, "
                    "or call reset() to capture again."
                )


def _copied(outputs: Any) -> Any:
    """Outputs that the next replay does not overwrite."""
    return tree_map_only(Tensor, lambda one: one.detach().clone(), outputs)


def _described(tensors: tuple[Tensor, ...]) -> list[str]:
    return [f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in tensors]
