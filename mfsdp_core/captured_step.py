"""A whole training step as one CUDA graph: forward, backward, reductions, update.

    call 1 to 4   run as they are, on the stream that will be captured; memory of weights, gradients
                  or optimizer state that moves between the last two gives a warning
    call 5        captured, and replayed
    call 6 ...    replayed

On a device without graphs (a CPU) every call runs unchanged.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.events import Event
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.wrapper import MegatronFSDP

#: Calls before the capture: orders are learned, optimizer state is made.
_WARM_UP_CALLS = 4


class CapturedStep:
    """Call it as `step`, with the same number of tensors of the same shapes each time.

    A graph repeats kernels with the addresses and numbers of its capture, and nothing that the host
    does: keep numbers that change in tensors. CUDA refuses a capture in which the host reads memory
    of the device.

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
        model.param_and_grad_buffer.before_close.append(reset)

        def capture_anew(_optimizer: torch.optim.Optimizer) -> None:
            forget = reset()
            if forget is not None:
                forget()

        optimizer.register_load_state_dict_post_hook(capture_anew)

    def reset(self) -> None:
        """Forget the graph: the next calls warm up, and one is captured again."""
        self._finished = 0
        self._addresses: dict[str, int] = {}
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None
        self._events: list[Event] = []
        self._settings: dict[str, object] = {}

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._replay is not None

    def __call__(self, *inputs: Tensor) -> Any:
        """One step.

        Raises:
            ConfigurationError: other inputs than those of the first call.
            LifecycleError: a number of the optimizer, or the model's mode, has changed since.
        """
        static = self._take(inputs)
        self._refuse_changes()
        if self._replay is not None:
            self._replay()
            self._publish()
            return _copied(self._outputs)
        if self._finished >= _WARM_UP_CALLS and self._streams.has_graphs:
            return self._capture(static)
        try:
            with self._streams.captured_stream():
                outputs = self._step(*static)
        except BaseException:
            self.reset()  # what a pass has left behind changes the next one
            raise
        self._finished += 1
        if self._finished == _WARM_UP_CALLS - 1:
            self._settings = self._current_settings()
            self._addresses = self._current_addresses()
        elif self._finished == _WARM_UP_CALLS:
            self._refuse_changes()
            self._warn_of_moved_memory()
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

    def _capture(self, inputs: tuple[Tensor, ...]) -> Any:
        unsubscribe = self._model.events.subscribe(self._events.append)
        try:
            self._replay, self._outputs = self._streams.capture(lambda: self._step(*inputs))
        finally:
            unsubscribe()
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

    def _current_addresses(self) -> dict[str, int]:
        tensors: dict[str, Any] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = f"param_groups[{index}]['params'][{number}]"
                tensors |= {name: parameter, f"{name}.grad": parameter.grad}
                state = self._optimizer.state[parameter]
                tensors |= {f"{name}: {key}": value for key, value in state.items()}
        return {
            name: local_tensor(tensor).data_ptr()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        }

    def _warn_of_moved_memory(self) -> None:
        now = self._current_addresses()
        moved = [name for name, address in now.items() if self._addresses.get(name) != address]
        if moved:
            warnings.warn(
                f"CapturedStep: the memory of {moved[0]} and {len(moved) - 1} others moved from "
                "one step to the next; a graph goes on with the memory of its capture. Keep it in "
                "place (allocator='fixed_pool'), or leave out CapturedStep.",
                stacklevel=3,
            )

    def _refuse_changes(self) -> None:
        if not self._settings:
            return
        for name, value in self._current_settings().items():
            before = self._settings.get(name)
            if value != before:
                raise LifecycleError(
                    f"CapturedStep: {name} was {before} when the step warmed up, found {value}; "
                    "a graph repeats the former. Make it a tensor, which is read at every replay, "
                    "or call reset() to capture again."
                )


def _copied(outputs: Any) -> Any:
    """Outputs that the next replay does not overwrite."""
    return tree_map_only(Tensor, lambda one: one.detach().clone(), outputs)


def _described(tensors: tuple[Tensor, ...]) -> list[str]:
    return [f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in tensors]
