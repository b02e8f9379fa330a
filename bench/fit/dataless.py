"""Tensors without contents: a step of a real engine runs, and no element is ever computed.

[Note: tensors without data] Such a tensor is a plain CPU tensor whose memory is reserved and never
touched: the kernel backs no page of it. Every operation on one yields the tensors without data that
torch's meta kernels describe; views are views, storages come, go and are resized as ever, so
autograd, hooks and allocators do what they do in a run. torch's own FakeTensorMode was tried
first: `Module.to` refuses its parameters (torch 2.13), and what asks a tensor for its address gets
none. What contents are known (tokens, indices of them, counts on the host) is computed. Numbers
read from tensors without data are 1 for floats and 0 for integers; experts are chosen evenly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bench.errors import UnsupportedError
from bench.meters.operation_counter import dispatches

#: Whose stubs lack what is used here.
_C10D: Final[Any] = c10d
_META: Final = torch.device("meta")
_EMPTY: Final = frozenset(
    ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
)
_AS_THEY_ARE: Final = frozenset(("set_", "resize_", "detach", "lift_fresh", "alias"))
_READS: Final = frozenset(("_local_scalar_dense", "equal"))
_FUNCTIONAL: Final = "_c10d_functional"

#: (operation, its group, tensors that it reads or writes)
OnCollective = Callable[[str, ProcessGroup, Sequence[Tensor]], None]
#: (number of a storage, bytes more or, negative, less, operation, a tensor of a new one)
OnChange = Callable[[int, int, str, Tensor | None], None]


class Dataless(TorchDispatchMode):
    """While it is active no float is computed. on_change gets every storage's bytes."""

    def __init__(self, on_change: OnChange, on_collective: OnCollective) -> None:
        super().__init__()
        self._on_change = on_change
        self._on_collective = on_collective
        self._shapes: dict[Any, tuple[list[Any], Any]] = {}
        self._storages: dict[int, tuple[Any, int, int]] = {}
        self._without_data: set[int] = set()
        self._made = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def number_of(self, tensor: Tensor) -> int | None:
        """What `on_change` calls the storage of a tensor; None of one that was made before."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Yield what the operation would; a tensor subclass comes back as its own tensors."""
        kwargs = kwargs or {}
        if FakeTensor in types or _asks_for_shapes():  # DTensor does
            return func(*args, **kwargs)
        if any(dispatches(kind) for kind in types):
            return NotImplemented
        result = self._run(func, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(tensor, func)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: PLR0911 - kinds of operations
        flat, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        dataless = any(t.untyped_storage()._cdata in self._without_data for t in tensors)
        if func.namespace in {"c10d", _FUNCTIONAL}:
            return self._communicate(func, args, tensors, dataless)
        if func.namespace != "aten" and func.has_kernel_for_dispatch_key("CPU"):
            if not tensors:
                return func(*args, **kwargs)
            with self:  # written in Python, of operations of torch's
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        operation = func._schema.name.partition("::")[2]
        if operation in _EMPTY:  # of integers, it is about to be filled
            made = func(*args, **kwargs)
            return self._emptied(made) if made.is_floating_point() else made
        if self._keeps_contents(func, tensors, kwargs):
            return func(*args, **kwargs)
        changes = func._schema.is_mutable or operation in _READS
        if not dataless and (changes or not self._makes_floats(func, tensors, kwargs)):
            return func(*args, **kwargs)
        if operation in _READS:
            return operation == "equal" or (1.0 if tensors[0].is_floating_point() else 0)
        written = _written(func, args, kwargs) if changes else None
        if written is None:
            return self._described(func, flat, tree, operation)
        if dataless:
            tree_map_only(Tensor, self._emptied, written)
        return written[0] if len(written) == 1 else (tuple(written) or None)

    @staticmethod
    def _keeps_contents(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
        """Views, changes of shape, and what is on the meta device anyway."""
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return True
        if func._schema.name.partition("::")[2] in _AS_THEY_ARE:
            return True
        return (
            any(t.is_meta for t in tensors) or torch.device(kwargs.get("device") or "cpu") == _META
        )

    @staticmethod
    def _makes_floats(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
        """Whether an operation on known contents yields floats, or nobody can tell yet."""
        if not tensors:
            return any(argument.name == "device" for argument in func._schema.arguments)
        wanted = kwargs.get("dtype") or tensors[0].dtype
        return bool(wanted.is_floating_point or wanted.is_complex)

    def _described(self, func: Any, flat: list[Any], tree: Any, operation: str) -> Any:
        key = (func, tree, tuple(_fact(leaf) for leaf in flat))
        if key not in self._shapes:
            self._shapes[key] = _shapes(func, flat, tree, operation)
        facts, result = self._shapes[key]
        if not any(isinstance(leaf, Tensor) for leaf in flat) and not _has_floats(facts):
            args, kwargs = tree_unflatten(flat, tree)
            return func(*args, **kwargs)
        outputs = [_reserve(*fact) if isinstance(fact, tuple) else fact for fact in facts]
        for output in outputs:
            if isinstance(output, Tensor):
                self._emptied(output)
        if operation == "topk" and outputs[1] is not None:
            self._choose_evenly(outputs[1], flat[0].shape[-1])
        return tree_unflatten(outputs, result)

    def _emptied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            self._without_data.add(tensor.untyped_storage()._cdata)
        return tensor

    def _choose_evenly(self, indices: Tensor, width: int) -> None:
        """Known numbers, every one as often as any other."""
        numbers = torch.arange(indices.numel(), device="cpu").remainder_(width)
        indices.copy_(numbers.view(indices.shape))
        self._without_data.discard(indices.untyped_storage()._cdata)

    def _communicate(self, func: Any, args: Any, tensors: list[Tensor], dataless: bool) -> Any:
        operation = func._schema.name.partition("::")[2].strip("_")
        if func.namespace == _FUNCTIONAL:
            if not isinstance(args[-1], str):  # waits for what one of the others has started
                return args[0]
            self._on_collective(operation, _C10D._resolve_process_group(args[-1]), tensors)
            flat, tree = tree_flatten((args, {}))
            return self._described(func, flat, tree, operation)
        if not dataless:  # a few integers, which the fake group leaves as they are
            return func(*args)
        group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        self._on_collective(operation, group, tensors)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tree_leaves(args[0]))
        work = _C10D._create_work_from_future(done).boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work

    def _note(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._made += 1
        number = self._made

        def gone(_: object, key: int = key, number: int = number) -> None:
            _, _, size = self._storages.pop(key)
            self._without_data.discard(key)
            self._on_change(number, -size, "", None)

        self._storages[key] = (weakref.ref(storage, gone), number, storage.nbytes())
        self._on_change(number, storage.nbytes(), str(func), tensor)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its bytes are others now."""
        known = self._storages.get(storage._cdata)
        if known is not None:
            reference, number, before = known
            self._storages[storage._cdata] = (reference, number, storage.nbytes())
            self._on_change(number, storage.nbytes() - before, "resize_", None)


@contextmanager
def tensors_without_data(on_change: OnChange, on_collective: OnCollective) -> Iterator[Dataless]:
    """Run a block on tensors without data.

    Raises:
        UnsupportedError: experts in another dtype than BF16, whose products torch describes alone;
            or this machine reserves less address space than one of the tensors takes.
    """
    mode = Dataless(on_change, on_collective)
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        mode.resized(storage)
        return result

    # No operation: the dispatcher is not asked, so a mode cannot see it.
    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign,assignment]
    try:
        with mode:
            yield mode
    except RuntimeError as error:
        if "Expected inputs of BF16 type" in str(error):
            raise UnsupportedError(
                "fit-grouped-products", "products of experts are traced in BF16 alone"
            ) from error
        if "can't allocate memory" not in str(error):
            raise
        raise UnsupportedError(
            "fit-address-space",
            f"too large to trace on this machine: {str(error).splitlines()[0][-200:]}. Memory is"
            " reserved, not used: lower train.micro_batch or train.seq_len, or set"
            " vm.overcommit_memory=1",
        ) from error
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _asks_for_shapes() -> bool:
    """Whether torch's own FakeTensorMode is on: what is made then takes no memory in a run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _fact(value: Any) -> Any:
    return (
        (value.shape, value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else (type(value), value)
    )


def _shapes(func: Any, flat: list[Any], tree: Any, operation: str) -> tuple[list[Any], Any]:
    """Sizes, strides and dtype of every output, by torch's meta kernels, and their structure."""
    has_tensors = any(isinstance(leaf, Tensor) for leaf in flat)
    metas = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
        if isinstance(leaf, Tensor)
        else (_META if isinstance(leaf, torch.device) else leaf)
        for leaf in flat
    ]
    args, kwargs = tree_unflatten(metas, tree)
    if not has_tensors:
        kwargs = {**kwargs, "device": _META}
    try:
        result = func(*args, **kwargs)
    except NotImplementedError as error:
        raise UnsupportedError(
            "no-shape-without-contents",
            f"nobody knows the shape of what {operation} yields without computing it: {error}",
        ) from error
    outputs, structure = tree_flatten(result)
    facts = [
        (tuple(output.shape), output.stride(), output.dtype)
        if isinstance(output, Tensor)
        else output
        for output in outputs
    ]
    return facts, structure


def _has_floats(facts: list[Any]) -> bool:
    return any(isinstance(fact, tuple) and fact[2].is_floating_point for fact in facts)


def _reserve(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _written(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The arguments that an operation returns; None where it returns others too."""
    arguments = func._schema.arguments
    tensors = []
    for result in func._schema.returns:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        for index, argument in enumerate(arguments):
            info = argument.alias_info
            if info is not None and info.before_set == result.alias_info.before_set:
                tensors.append(args[index] if index < len(args) else kwargs[argument.name])
    return tensors
