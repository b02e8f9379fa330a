"""The backward pass that autograd runs on this thread, if it runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import Variable

NO_BACKWARD: Final = -1

#: Number of the graph that autograd is running on this thread, -1 outside of a backward pass.
#: A flag set by a module's backward hook would not do: with reentrant checkpointing the recomputed
#: forward runs before that hook. Reentrant checkpointing also nests one graph in another.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether autograd is running a graph now, as it is while activations are recomputed."""
    return current_backward() != NO_BACKWARD


def leaves_parameters_alone() -> bool:
    """Whether the backward pass that runs is asked for other gradients than those of parameters.

    So it is under `autograd.grad` and `backward(inputs=...)`: there autograd keeps a list of what
    is to be executed, and no checkpoint would be valid. Of a tensor that is itself asked for,
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
