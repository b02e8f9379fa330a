"""Shards that are cut elsewhere than torch would cut them: computing with them is right or refused.

[Note: computing with uneven shards] torch works out from the shape alone which rows a rank has. On
shards that the flat layout has cut otherwise its `mean()` is NaN, `full_tensor()` raises or hangs,
and `std()` gathers the wrong rows. What treats every element by itself is left to torch, and so are
sums and norms. Anything else is refused, and the error names `gather_full`. Before a gather, ranks
agree on what they read: see [Note: named reads].
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import describe_chunk, described_offsets, offsets_of
from mfsdp_core.shard.dtensor import (
    agree_to_read,
    as_dtensor,
    as_specified,
    gather_full,
    local_tensor,
    name_of,
    name_tensor,
    without_offset,
)
from mfsdp_core.shard.subclass_dispatch import asked_for_operations

_CUT = "_mfsdp_cut"
_REFUSED = (
    "{func} of a sharded tensor needs rows of other ranks, or has tensors that are not cut alike. "
    "Expected an operation on every element by itself, a sum or a norm. Compute other values with "
    "gather_full(tensor), on all ranks. Write values by operations on all of the shard, into "
    "to_local(), or by load_state_dict(). What needs a gradient belongs into the forward of the "
    "module that holds the weight. To merge adapters or change shapes, load "
    "export_state_dict(model) into an unsharded model."
)
#: What torch says of operations on shards that it does not do, and of those with plain tensors.
_TORCH_REFUSES = ("not have a sharding strategy", "got mixed torch.Tensor and DTensor")

#: Results that are called what the argument is called.
_SAME = frozenset(("alias", "clone", "detach", "_to_copy"))
#: What the names of operations on lists of tensors begin with.
_IN_LISTS = ("_amp_foreach_", "_foreach_", "_fused_")
#: Rows of every rank, in the order of their slices.
Cut = tuple[int, ...]

_ELEMENTWISE = frozenset(
    (
        *("alias", "bernoulli", "bernoulli_", "clone", "copy_", "detach", "detach_", "empty_like"),
        *("exponential_", "fill_", "full_like", "log_normal_", "masked_fill", "masked_fill_"),
        *("native_dropout", "normal_", "ones_like", "rand_like", "randint_like", "randn_like"),
        *("random_", "uniform_", "zero_", "zeros_like", "_to_copy"),
    )
)
#: Over all elements, where torch adds up, or over other dims than rows, which are each rank's own.
_SUMS = frozenset(("_foreach_norm", "linalg_vector_norm", "norm", "sum"))


@asked_for_operations
class UnevenShard(DTensor):
    """See [Note: computing with uneven shards]. Without a cut it is a plain DTensor."""

    _local_tensor: torch.Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation of torch.

        Raises:
            LifecycleError: one that needs rows of other ranks, or mixes shards and whole tensors.
        """
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].full_tensor().item()  # torch would give this rank's part of a sum
        is_uneven = any(cut_of(tensor) is not None for tensor in tensors)
        if is_uneven and func._schema.name.startswith("aten::new_"):
            return _replicated(func(local_tensor(args[0]), *args[1:], **kwargs), args[0])
        if is_uneven and not _needs_own_rows_alone(func, args, kwargs, tensors):
            raise LifecycleError(_REFUSED.format(func=func))
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if any(words in str(error) for words in _TORCH_REFUSES):
                raise LifecycleError(_REFUSED.format(func=func)) from error
            raise
        _count_changes(func, args)
        if isinstance(result, (list, tuple)) and isinstance(args[0], (list, tuple)):
            pairs = zip(result, args[0], strict=True)
            return [_named(func, cut_like(one, source), source) for one, source in pairs]
        source = next((t for t in tensors if cut_of(t) is not None), tensors[0])
        return tree_map(lambda one: _named(func, cut_like(one, source), source), result)

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
            if not isinstance(self._local_tensor, FakeTensor):
                agree_to_read([self], "redistribute")
            return super().redistribute(device_mesh, placements, **options)
        if len(wanted) != self.device_mesh.ndim or not all(p.is_replicate() for p in wanted):
            raise LifecycleError(
                f"redistribute() of an uneven shard to {wanted}: expected replicas. Make them, and "
                "cut those: distribute_tensor(gather_full(tensor), mesh, placements)."
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    def __create_chunk_list__(self) -> Any:
        """Where this rank's rows lie: torch.distributed.checkpoint asks before it reads."""
        self._describe()
        return super().__create_chunk_list__()

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        """As above, before it writes."""
        self._describe()
        return super().__create_write_items__(fqn, object)

    def _describe(self) -> None:
        """See [Note: analytic chunks]. A shard over several axes says nothing by itself."""
        cut, cutting = cut_of(self), [i for i, p in enumerate(self.placements) if p.is_shard()]
        if cut is not None and len(cutting) == 1 and described_offsets(self) is None:
            first_row = sum(cut[: self.device_mesh.get_local_rank(cutting[0])])
            describe_chunk(self, (first_row, *[0] * (self.ndim - 1)))

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


def _refuse_storage(what: str) -> None:
    """Let `what` be answered to torch alone, which knows DTensors: it would say that all is one."""
    ask = getattr(DTensor, what)

    def answer(shard: DTensor) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return ask(shard)
        raise LifecycleError(
            f"{what}() of {name_of(shard) or 'a shard'}: a sharded tensor has no storage of its "
            "own, and rows of it on each rank. To write a model to files use "
            "save_safetensors(path, model); for whole weights in memory export_state_dict(model), "
            "whose tensors save_pretrained(state_dict=...) takes; for this rank's rows "
            "tensor.to_local()."
        )

    setattr(UnevenShard, what, answer)


for _what in ("data_ptr", "storage", "untyped_storage"):
    _refuse_storage(_what)


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
    """Whether `gather_full` puts it together: cut over one axis at most, with torch's rows.

    As `distribute_tensor` and `set_model_state_dict(full_state_dict=True)` make them.
    """
    if cut_of(shard) is not None or sum(not p.is_replicate() for p in shard.placements) > 1:
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


def _needs_own_rows_alone(func: Any, args: Any, kwargs: Any, tensors: Sequence[DTensor]) -> bool:
    """Whether torch gets it right on shards that it would have cut otherwise."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_IN_LISTS) and name != "_foreach_norm":
        lists = [one for one in args if isinstance(one, (list, tuple)) and one]
        return all(_alike(row) for row in zip(*lists, strict=False))
    if name in _SUMS:
        given = dict(
            zip((one.name for one in func._schema.arguments), args, strict=False), **kwargs
        )
        dims = given.get("dim")
        if dims is not None and dims != []:
            listed = dims if isinstance(dims, (list, tuple)) else [dims]
            return all(dim % tensors[0].ndim for dim in listed)
        return name == "sum" or given.get("p", given.get("ord", 2)) not in (inf, -inf, None)
    is_known = name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
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


def _replicated(result: torch.Tensor, like: DTensor) -> DTensor:
    replicas = [Replicate()] * like.device_mesh.ndim
    return _uneven(DTensor.from_local(result, like.device_mesh, replicas, run_check=False), None)


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
