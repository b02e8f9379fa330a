"""What DTensor's subclasses compute goes through their `__torch_dispatch__`, on every torch.

[Note: dispatch of DTensor subclasses] torch 2.11 computes with any DTensor in C++ and never asks
its subclass (pytorch#177716, mended in 2.12). There an operation on a subclass comes to
`__torch_function__`, which puts a dispatch mode around it, and the mode asks the subclass. The
nodes of autograd that the operation leaves enter the same mode when they run.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Kind = TypeVar("_Kind", bound=DTensor)

#: Attributes that compute something when they are read.
_COMPUTED = frozenset(("H", "T", "imag", "mH", "mT", "real"))


def asked_for_operations(subclass: type[_Kind]) -> type[_Kind]:
    """A decorator: what is computed with `subclass` reaches its `__torch_dispatch__`."""
    if not _torch_asks_subclasses():
        mode = _Asking(subclass)

        def through_mode(_cls: Any, func: Any, _types: Any, args: Any, kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if _only_reads(func):
                    return func(*args, **(kwargs or {}))
                with mode:
                    results = func(*args, **(kwargs or {}))
            mode.enter_in_backward_of(results)
            return results

        subclass.__torch_function__ = classmethod(through_mode)  # type: ignore[assignment]
    return subclass


class _Asking(TorchDispatchMode):
    """Hands operations on `subclass` to it."""

    def __init__(self, subclass: Any) -> None:
        super().__init__()
        self._subclass = subclass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, self._subclass) for leaf in tree_leaves((args, kwargs))):
            return self._subclass.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def enter_in_backward_of(self, results: Any) -> None:
        """Be entered while the nodes of autograd behind `results` run, as far as they are new."""
        tensors = (leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor))
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors]  # torch types metadata wrongly
        while nodes:
            node = nodes.pop()
            if node is None or self in node.metadata:
                continue
            node.metadata[self] = True
            node.register_prehook(self._stay)
            nodes += [before for before, _ in node.next_functions]

    def _stay(self, _gradients: Any) -> None:
        """While a node runs and its gradients are added to others; the engine then leaves."""
        torch._C._push_on_torch_dispatch_stack(self)


def _only_reads(func: Any) -> bool:
    """Whether `func` reads or sets an attribute and computes nothing."""
    accessor = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return accessor and getattr(func.__self__, "__name__", "") not in _COMPUTED


def _torch_asks_subclasses() -> bool:
    """Whether torch asks subclasses of DTensor.

    Of a torch before 2.12, which may have the change already, one is made, without a mesh, and
    computed with. That loads much of torch, and a later torch need not be checked.
    """
    if torch.__version__ >= "2.12":
        return True

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(cls, *_operation: Any) -> Any:
            return torch.empty(0)

    local = torch.empty(0)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec: Any = DTensorSpec(None, (Replicate(),), meta)  # type: ignore[arg-type]
    try:
        torch.ops.aten.detach.default(Probe(local, spec, requires_grad=False))
    except RuntimeError:  # torch has looked for the mesh
        return False
    return True
