"""What really goes over the wire, whoever sends it: torch's dispatcher, listened to.

Every collective of torch.distributed, also one that C++ code starts, is an operator of the
namespace `c10d`, or a functional one of `_c10d_functional`. A dispatch mode sees each with the
tensors that it moves, so their dtype and size need not be taken on trust from the engine's own
log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.validate.observation import Sent

#: Operators that move no payload.
_SILENT = frozenset({"barrier", "monitored_barrier_"})
#: Functional operators by the name of what they call, which no mode sees.
_FUNCTIONAL = {
    "all_reduce": "allreduce_",
    "all_gather_into_tensor": "_allgather_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "broadcast": "broadcast_",
}


class WireTap(TorchDispatchMode):
    """Use as a context manager; `take` returns what was sent since the last call.

    model_ranks: functional collectives over these are the model's own, and not noted.
    """

    def __init__(self, model_ranks: list[int] | None = None) -> None:
        super().__init__()
        self._model_ranks = model_ranks
        self._sent: list[Sent] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note a collective, and let everything through."""
        del types
        if func.namespace == "c10d":
            self._note(func, args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and isinstance(result, Tensor):
            self._note_functional(func.__name__.partition(".")[0], result, args)
        return result

    def take(self) -> list[Sent]:
        """In order of issue."""
        sent, self._sent = self._sent, []
        return sent

    def _note_functional(self, name: str, output: Tensor, args: tuple[Any, ...]) -> None:
        """The group is the last argument, by name; an output may be the larger buffer."""
        if name in _FUNCTIONAL:
            full = max(args[0], output, key=Tensor.numel)
            dtype = str(full.dtype).removeprefix("torch.")
            group = distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
            ranks = distributed_c10d.get_process_group_ranks(group)
            if ranks != self._model_ranks:
                size = full.numel(), full.nbytes, len(ranks)
                self._sent.append(Sent(_FUNCTIONAL[name], dtype, *size, args[-1]))

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        name = func.__name__.partition(".")[0]
        if name in _SILENT or name.startswith("recv"):
            return
        tensors = [leaf for leaf in tree_iter(list(args)) if isinstance(leaf, Tensor)]
        # Of input and output the full buffer is the larger; lists of parts have all of it in one.
        full = max(_groups(args), key=lambda group: sum(t.numel() for t in group), default=tensors)
        if name.startswith("alltoall"):  # where ranks send unlike parts, the input is what is sent
            full = [*_groups(args)][1]
        if not full:
            return
        elements = sum(tensor.numel() for tensor in full)
        dtype = str(full[0].dtype).removeprefix("torch.")
        size = elements * full[0].element_size()
        self._sent.append(Sent(name, dtype, elements, size, *_group(args)))


def _groups(args: tuple[Any, ...]) -> Iterator[list[Tensor]]:
    for argument in args:
        tensors = [leaf for leaf in tree_iter(argument) if isinstance(leaf, Tensor)]
        if tensors:
            yield tensors


def _group(args: tuple[Any, ...]) -> tuple[int, str]:
    """Ranks and name of the process group among `args`."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = ProcessGroup.unbox(argument)
                return group.size(), group.group_name
            except (RuntimeError, TypeError):
                continue  # a reduce operation, the other kind of object
    return 0, ""


def ring_bytes(sent: Sent) -> int:
    """Bytes that a rank sends for it, by the ring convention; a message is its own size.

    A ring passes the full buffer on once, and twice to reduce it on all ranks; (n-1)/n of it each.
    """
    if sent.operation == "send":
        return sent.payload_bytes
    passes = 2 if sent.operation.startswith("allreduce") else 1
    return passes * sent.payload_bytes * (sent.ranks - 1) // max(1, sent.ranks)
