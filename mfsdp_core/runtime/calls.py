"""Which calls of units a backward pass can still reach.

[Note: call numbers] A counter is read when a call of a unit begins and when it ends. Autograd runs
what a later operation has left before what an earlier one has left, so a backward pass that has
come to the call which ended at number n is done with every call that began after n, whether it got
a gradient or never will. A unit whose calls have all begun after n is *over*: its missing gradients
are zeros, and nobody will ask for its weights again in this backward pass.

A pass is known as long as something of its graph is alive: the hooks on it hold the record. Where
calls cannot be distinguished (a unit that runs several times under reentrant checkpointing), the
number stays where it was, and what is over is found at the end of the backward pass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import Variable

NO_BACKWARD: Final = -1

#: Number of the graph that autograd is running on this thread, -1 outside of a backward pass.
#: A flag set by a module's backward hook would not do: with reentrant checkpointing the recomputed
#: forward runs before that hook. Reentrant checkpointing also nests one graph in another.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether autograd is running a graph now, also while activations are recomputed."""
    return current_backward() != NO_BACKWARD


def leaves_parameters_alone() -> bool:
    """Whether the backward pass that runs computes other gradients than those of parameters.

    So it is under `autograd.grad` and `backward(inputs=...)`: there autograd keeps a list of what
    is to be executed, and no checkpoint would be valid. Of a tensor that is itself an input,
    nothing that comes after it is executed. To be called in a hook.
    """
    if not Variable._execution_engine.is_checkpoint_valid():
        return True
    node: Any = torch._C._current_autograd_node()
    following = [one for one, _ in node.next_functions if one is not None]
    try:
        return bool(following) and not any(map(torch._C._will_engine_execute_node, following))
    except RuntimeError:  # "A leaf node was passed ..."
        return True


@dataclass(eq=False)
class ForwardPass:
    """Calls of one forward pass, by index of the unit.

    is_whole: the root ran, rather than a unit on its own. began: number at which the first call of
    a unit began. ended: numbers at which its calls ended. answered: its backward pass is over.
    called_by: number by which all that the root runs had been called.
    has_nested_graphs: units ran without a graph within it, as reentrant checkpointing runs them:
    what nested graphs add to a unit comes at any time.
    """

    is_whole: bool
    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, list[int]] = field(default_factory=dict)
    answered: bool = False
    called_by: int = sys.maxsize
    has_nested_graphs: bool = False


class Call(NamedTuple):
    """One call of a unit, or of the root. number: the count when it ended."""

    forward: ForwardPass
    number: int


class CallBook:
    """Numbers calls, and knows those of every graph that is alive."""

    def __init__(self) -> None:
        #: How many calls have begun and ended.
        self.count = 0
        #: Of the newest pass: numbers at which units and modules of the root were first called.
        self.began: dict[int, int] = {}
        self._running: ForwardPass | None = None
        self._depth = 0
        self._alive: weakref.WeakSet[ForwardPass] = weakref.WeakSet()

    @property
    def is_counting(self) -> bool:
        """Whether a forward pass that will have a backward pass is running."""
        return self._running is not None

    def begin_pass(self) -> None:
        """The root begins to run with gradients enabled."""
        self._running = self._new_pass(is_whole=True)
        self._depth = 1

    def begin_call(self, index: int) -> None:
        """A unit begins to run outside of a backward pass, in the root or on its own."""
        if self._running is None:
            self._running = self._new_pass(is_whole=False)
        self._depth += 1
        self.count += 1
        self._running.began.setdefault(index, self.count)

    def begin_in_root(self, index: int) -> None:
        """A module begins to run that holds parameters of a bucket of the root."""
        if self._running is not None:
            self.count += 1
            self._running.began.setdefault(index, self.count)

    def end_call(self, index: int | None) -> Call | None:
        """It (None: the root) has run; None where nobody counts."""
        forward = self._running
        if forward is None:
            return None
        self._depth -= 1
        if not self._depth or index is None:  # a unit may have raised, and the model gone on
            self.abandon_pass()
        self.count += 1
        if index is None:
            forward.called_by = self.count
            self.count += 1
        else:
            forward.ended.setdefault(index, []).append(self.count)
        return Call(forward, self.count)

    def mark(self) -> Call | None:
        """A module inside a unit's call has run: a point of the pass, as the end of a call is."""
        if self._running is None:
            return None
        self.count += 1
        return Call(self._running, self.count)

    def expect_nested_graphs(self) -> None:
        """A unit runs without a graph in the pass that is running."""
        if self._running is not None:
            self._running.has_nested_graphs = True

    @property
    def may_nest_graphs(self) -> bool:
        """Whether a backward pass that begins now may have graphs nested in it."""
        return any(one.has_nested_graphs and not one.answered for one in self._alive)

    def abandon_pass(self) -> None:
        """Nothing runs any more, or what was running has raised."""
        self._running = None
        self._depth = 0

    def is_over(self, index: int | None, reached: int | None) -> bool:
        """Whether a backward pass that has come to `reached` can no longer come to the unit.

        Never so for the root, and before the pass has come to any call.
        """
        if reached is None or index is None:
            return False
        # A unit that this rank left out is over at once: others gather it before what comes next.
        return all(
            forward.answered
            or forward.began.get(index, forward.called_by if index < 0 else sys.maxsize) > reached
            for forward in self._alive
        )

    def _new_pass(self, *, is_whole: bool) -> ForwardPass:
        forward = ForwardPass(is_whole)
        self._alive.add(forward)
        self.began = forward.began
        return forward
