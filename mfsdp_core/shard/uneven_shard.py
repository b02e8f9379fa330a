"""Shards that are cut elsewhere than torch would cut them: computing with them is right or refused.

[Note: computing with uneven shards] torch works out from the shape alone which rows a rank has. On
shards that the flat layout has cut otherwise its `mean()` is NaN, `full_tensor()` raises or hangs,
and `std()` gathers the wrong rows. What treats every element, or every row, by itself is left to
torch, and so are sums and norms. Anything else gets whole tensors, which are gathered for it: all
ranks must call it. Views get such a copy too, and are read alone: what would write into one is
refused, since the shard would not follow. Before a gather, be it ours or one that torch makes for
an operation, ranks agree on what they read: see [Note: named reads].
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import described_offsets, offsets_of
from mfsdp_core.shard.dtensor import (
    agree_to_read,
    as_dtensor,
    as_specified,
    assemble,
    gather_full,
    local_tensor,
    name_of,
    name_tensor,
    without_offset,
)
from mfsdp_core.shard.subclass_dispatch import asked_for_operations

_CUT = "_mfsdp_cut"
_VIEW = "_mfsdp_is_gathered_view"
_LOST = (
    "{func} on rows, slices or views of a sharded tensor, or together with a tensor that is cut "
    "otherwise, would write to a copy that the shard does not follow. Write values by operations "
    "on all of the shard, into to_local(), or by load_state_dict(). Adapters are merged in an "
    "unsharded model that has loaded export_state_dict(model)."
)

#: Results that are called what the argument is called.
_SAME = frozenset(("alias", "clone", "detach", "_to_copy"))
#: What the names of operations on lists of tensors begin with.
_IN_LISTS = ("_amp_foreach_", "_foreach_", "_fused_")
#: Of torch's collectives, as operations.
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_dtensor"))

#: What torch says of an operation that it does not do with shards, and of one with other tensors.
#: The latter is computed on whole tensors only where no gradient is lost by it.
_NOT_WITH_SHARDS, _MIXED = "not have a sharding strategy", "got mixed torch.Tensor and DTensor"

#: Rows of every rank, in the order of their slices.
Cut = tuple[int, ...]

_ROW_BY_ROW = frozenset(
    (
        *("alias", "bernoulli", "bernoulli_", "clone", "copy_", "detach", "detach_", "empty_like"),
        *("exponential_", "fill_", "full_like", "log_normal_", "masked_fill", "masked_fill_"),
        *("native_dropout", "normal_", "ones_like", "rand_like", "randint_like", "randn_like"),
        *("random_", "uniform_", "zero_", "zeros_like", "_to_copy"),
    )
)
#: Those over other dims than rows are each rank's own; those over all, where torch adds up.
_REDUCTIONS = frozenset(
    (
        *("all", "amax", "amin", "any", "argmax", "argmin", "cumsum", "_foreach_norm"),
        *("linalg_vector_norm", "logsumexp", "_log_softmax", "mean", "norm", "prod", "_softmax"),
        *("std", "sum", "var"),
    )
)


@asked_for_operations
class UnevenShard(DTensor):
    """See [Note: computing with uneven shards]. Without a cut it is a plain DTensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation of torch.

        Raises:
            LifecycleError: one that would lose what it writes.
        """
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        _check_written(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].full_tensor().item()  # torch would give this rank's part of a sum
        is_uneven = any(cut_of(tensor) is not None for tensor in tensors)
        if not is_uneven or _is_row_by_row(func, args, kwargs, tensors):
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
            try:
                with _named_reads(func, tensors):
                    result = func(*plain_args, **plain_kwargs)
            except (NotImplementedError, RuntimeError) as error:
                is_mixed = _MIXED in str(error)
                if is_mixed and torch.is_grad_enabled():
                    raise LifecycleError(
                        f"{str(error).partition(',')[0]}: outside of its unit a sharded weight "
                        "would lose its gradient. Under torch.no_grad() it is read whole; to "
                        "change its shape, load export_state_dict(model) into an unsharded model."
                    ) from error
                if not is_mixed and _NOT_WITH_SHARDS not in str(error):
                    raise
                return _on_whole(func, args, kwargs, tensors)
            _count_changes(func, args)
            if any(hasattr(tensor, _VIEW) for tensor in tensors):
                _mark_views(func, result)
            if isinstance(result, (list, tuple)) and isinstance(args[0], (list, tuple)):
                pairs = zip(result, args[0], strict=True)
                return [_named(func, cut_like(one, source), source) for one, source in pairs]
            source = next((t for t in tensors if cut_of(t) is not None), tensors[0])
            return tree_map(lambda one: _named(func, cut_like(one, source), source), result)
        return _on_whole(func, args, kwargs, tensors)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, with all rows in their order. Collective; shards get no gradient."""
        if all(placement.is_replicate() for placement in self.placements):
            return self.to_local(grad_placements=grad_placements)
        if not any(placement.is_shard() for placement in self.placements):
            return super().full_tensor(grad_placements=grad_placements)
        whole: torch.Tensor = _Gathered.apply(self)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """As torch does it, or replicated over the whole mesh. Collective.

        Raises:
            LifecycleError: other placements, which torch would cut at other rows.
        """
        wanted = tuple(placements or ())
        if cut_of(self) is None or wanted == self.placements:
            with _NamedReads("redistribute", [self]):
                return super().redistribute(device_mesh, placements, **options)
        if len(wanted) != self.device_mesh.ndim or not all(p.is_replicate() for p in wanted):
            raise LifecycleError(
                f"redistribute() of an uneven shard to {wanted}: expected replicas. Make them, and "
                "cut those: distribute_tensor(gather_full(tensor), mesh, placements)."
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    def data_ptr(self) -> int:
        """Refuse: torch would say 0, which is the same for all shards."""
        _refuse_storage(self, "data_ptr()")
        return super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse: torch would give one without memory."""
        _refuse_storage(self, "untyped_storage()")
        return super().untyped_storage()

    def storage(self) -> torch.TypedStorage:
        """Refuse, as `untyped_storage`."""
        _refuse_storage(self, "storage()")
        return super().storage()  # type: ignore[no-any-return]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """As a DTensor, and how it is cut."""
        plain = without_offset(self).requires_grad_(self.requires_grad)
        return _uneven, (plain, cut_of(self), name_of(self))


def with_cut(shard: DTensor, cut: Sequence[int], name: str) -> DTensor:
    """The same shard as an `UnevenShard`, with `cut` where ranks have different numbers of rows.

    On a mesh of several axes always: ranks must agree, and each knows the cut of one axis.
    """
    known = len(set(cut)) > 1 or (cut and shard.device_mesh.ndim > 1)
    return _uneven(shard, tuple(cut) if known else None, name)


def _uneven(shard: DTensor, cut: Cut | None, name: str = "") -> DTensor:
    shard.__class__ = UnevenShard
    if cut is not None:
        setattr(shard, _CUT, cut)
    if name:
        name_tensor(shard, name)
    return shard


def _refuse_storage(shard: DTensor, what: str) -> None:
    """Refuse a question that only torch, which knows DTensors, gets an answer to."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
        return
    raise LifecycleError(
        f"{what} of {name_of(shard) or 'a shard'}: a sharded tensor has no storage of its own, and "
        "rows of it on each rank. To write a model to files use save_safetensors(path, model); for "
        "whole weights in memory export_state_dict(model), whose tensors save_pretrained("
        "state_dict=...) takes; for this rank's rows tensor.to_local()."
    )


class _NamedReads(TorchDispatchMode):
    """Ranks agree before the first collective that torch issues for one operation."""

    def __init__(self, operation: str, tensors: Sequence[DTensor]) -> None:
        super().__init__()
        self._operation = operation
        self._tensors = tensors
        self._agreed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as what it does with local tensors
        if func.namespace in _COLLECTIVES and not self._agreed and "wait" not in str(func):
            self._agreed = True
            if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                agree_to_read(self._tensors, self._operation)
        return func(*args, **(kwargs or {}))


def _on_whole(func: Any, args: Any, kwargs: Any, tensors: Sequence[DTensor]) -> Any:
    """What `func` makes of whole tensors, which are gathered for it."""
    if func._schema.is_mutable:
        raise LifecycleError(_LOST.format(func=func))
    mesh = tensors[0].device_mesh
    agree_to_read(tensors)
    whole_args, whole_kwargs = tree_map(_whole, (args, kwargs))
    results = tree_map(partial(_replicated, mesh), func(*whole_args, **whole_kwargs))
    _mark_views(func, results)
    return results


def _named_reads(func: Any, tensors: Sequence[DTensor]) -> AbstractContextManager[Any]:
    """Agreement on what `func` sends, where it may send anything."""
    name = func._schema.name.removeprefix("aten::")
    is_local = name in _ROW_BY_ROW or torch.Tag.pointwise in func.tags
    if is_local or (name.startswith(_IN_LISTS) and name != "_foreach_norm"):
        first = tensors[0].placements
        if all(t.placements == first and not any(map(_is_partial, first)) for t in tensors):
            return nullcontext()
    return _NamedReads(name, tensors)


def _is_partial(placement: Placement) -> bool:
    return placement.is_partial()


def _named(func: Any, result: Any, source: DTensor) -> Any:
    """`result` of an operation on `source` with a name that says so."""
    if not isinstance(result, DTensor):
        return result
    name = name_of(source)
    operation = func._schema.name.removeprefix("aten::")
    if name and not func._schema.is_mutable and operation not in _SAME:
        name = f"{operation} on {name.rpartition(' on ')[2]}"
    return _uneven(result, cut_of(result), name)


torch.serialization.add_safe_globals([_uneven])


def is_cut_alike(shard: DTensor, own: DTensor) -> bool:
    """Whether a shard, made here or unpickled, holds the rows of a parameter on every rank."""
    return (
        tuple(shard.placements) == tuple(own.placements)
        and cut_of(shard) == cut_of(own)
        and local_tensor(shard).shape == local_tensor(own).shape
        and described_offsets(shard) in (None, offsets_of(own))
    )


def is_cut_by_torch(shard: DTensor) -> bool:
    """Whether `gather_full` puts it together: a shard over one axis with the rows torch gives it.

    As `distribute_tensor` and `set_model_state_dict(full_state_dict=True)` make them.
    """
    if cut_of(shard) is not None or shard.device_mesh.ndim > 1:
        return False
    size, _ = compute_local_shape_and_global_offset(
        shard.shape, shard.device_mesh, shard.placements
    )
    return tuple(local_tensor(shard).shape) == tuple(size)


def own_rows(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of what this rank's shard of `parameter` has of `whole`."""
    offsets = offsets_of(parameter)
    assert offsets is not None
    rows = whole.reshape(parameter.shape)
    for dim, (start, length) in enumerate(zip(offsets, local_tensor(parameter).shape, strict=True)):
        rows = rows.narrow(dim, start, length)
    return rows


def cut_of(tensor: object) -> Cut | None:
    """The rows of each rank, where torch would get them wrong."""
    found: Cut | None = getattr(tensor, _CUT, None)
    return found


class _Gathered(torch.autograd.Function):
    """`gather_full`, without a gradient and not silently so."""

    @staticmethod
    def forward(_context: Any, shard: DTensor) -> torch.Tensor:
        return gather_full(shard)

    @staticmethod
    def backward(_context: Any, _gradient: torch.Tensor) -> Any:
        raise LifecycleError(
            "a gradient came to full_tensor() of a sharded parameter, which is reduced over ranks "
            "and gets gradients from the model's forward alone. Compute what depends on weights in "
            "the forward of the module that holds them, or under torch.no_grad()."
        )


def _replicated(mesh: DeviceMesh, result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    replicas = [Replicate()] * mesh.ndim
    return _uneven(DTensor.from_local(result, mesh, replicas, run_check=False), None)


def _mark_views(func: Any, results: Any) -> None:
    """Know what `func` returns as views, where it does."""
    if any(one.alias_info is not None for one in func._schema.returns):
        for result in tree_leaves(results):
            if isinstance(result, DTensor):
                result.__class__ = UnevenShard
                setattr(result, _VIEW, True)


def _check_written(func: Any, args: Any) -> None:
    """Refuse to write into a view of an uneven shard, which is a copy."""
    if not func._schema.is_mutable:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(hasattr(one, _VIEW) for one in tree_leaves(value)):
            raise LifecycleError(_LOST.format(func=func))


def _is_row_by_row(func: Any, args: Any, kwargs: Any, tensors: Sequence[DTensor]) -> bool:
    """Whether torch gets it right, since each rank needs its own rows alone."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_IN_LISTS) and name != "_foreach_norm":
        lists = [one for one in args if isinstance(one, (list, tuple)) and one]
        return all(_alike(row) for row in zip(*lists, strict=False))
    if name in _REDUCTIONS:
        given = dict(
            zip((one.name for one in func._schema.arguments), args, strict=False), **kwargs
        )
        dims = given.get("dim")
        if dims is not None and dims != []:
            listed = dims if isinstance(dims, (list, tuple)) else [dims]
            return all(dim % tensors[0].ndim for dim in listed)
        order = given.get("p", given.get("ord", 2))
        return name == "sum" or ("norm" in name and order not in (inf, -inf, None))
    is_known = name in _ROW_BY_ROW or torch.Tag.pointwise in func.tags
    return is_known and _alike(tensors)


def _alike(tensors: Iterable[object]) -> bool:
    """Whether all shards among them have the same rows, and the rest is the same for every row."""
    among = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    first = next((tensor for tensor in among if cut_of(tensor) is not None), None)
    if first is None:
        return True
    for tensor in among:
        if not all(p.is_replicate() or p.is_partial() for p in tensor.placements):
            fits = (tensor.ndim, tensor.placements) == (first.ndim, first.placements)
            if not fits or cut_of(tensor) != cut_of(first):
                return False
        elif tensor.ndim >= first.ndim and (first.shape[0] == 1 or tensor.shape[-first.ndim] != 1):
            return False  # torch would give each rank the rows that it thinks are its own
    return True


def _count_changes(func: Any, args: Any) -> None:
    """Count a change in place of many tensors at once, which autograd does not count.

    Of the shard as well as of its local tensor: `detach()` shares the count of the former alone.
    """
    if func._schema.is_mutable and func._schema.name.removeprefix("aten::").startswith(_IN_LISTS):
        both = (*args[0], *(tensor._local_tensor for tensor in args[0]))
        torch.autograd.graph.increment_version(both)


def cut_like(result: Any, source: Any) -> Any:
    """Note on a result that it is cut as `source` is, and changes where it does."""
    if not isinstance(result, DTensor) or not isinstance(source, UnevenShard):
        return result
    if (result.shape[:1], result.placements) == (source.shape[:1], source.placements):
        return _uneven(result, cut_of(source), name_of(source))
    return result


def shard_like(local: torch.Tensor, shard: DTensor) -> DTensor:
    """`local` as a shard that is placed and cut as `shard` is."""
    if local.dtype == shard.dtype:
        made = as_specified(local, shard._spec)
    else:
        made = as_dtensor(local, tuple(shard.shape), shard.device_mesh, tuple(shard.placements))
    alike: DTensor = cut_like(made, shard)
    return alike


def _plain(value: Any) -> Any:
    """A subclass of DTensor as a DTensor over the same memory, which torch computes with."""
    if not isinstance(value, UnevenShard):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if any(isinstance(placement, Partial) for placement in value.placements):
        return value.full_tensor()
    return assemble(value)
