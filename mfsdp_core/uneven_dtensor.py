"""Functions on DTensors whose shards differ in length, under upstream's names.

Every DTensor is taken, those of this package and others, as long as each rank holds one box of the
whole. All functions are collective over the mesh of their argument, since they ask the other ranks
how much they hold. Nothing in this package needs them: see [Note: analytic chunks].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from mfsdp_core.comm.uneven import row_counts
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError, LayoutError, refuse
from mfsdp_core.shard.chunk import Offsets, describe_chunk
from mfsdp_core.shard.dtensor import agree_to_read, as_dtensor, assembly_order, gather_full
from mfsdp_core.shard.dtensor import local_tensor as local_of
from mfsdp_core.shard.experts import expert_scope
from mfsdp_core.upstream_view import DistIndex

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor, on every rank.

    Raises:
        TypeError: not a DTensor.
        LayoutError: a rank holds more than one box of it.
    """
    _check_type(dtensor)
    return gather_full(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The same as a DTensor that is replicated over all dimensions of its mesh."""
    whole = uneven_dtensor_to_full_tensor(dtensor)
    placements = [Replicate() for _ in dtensor.placements]
    return DTensor.from_local(whole, dtensor.device_mesh, placements, run_check=False)


#: Upstream's older name.
gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Where this rank's part begins in the whole, and how large it is."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    sizes = torch.Size(local_of(dtensor).shape)
    return ChunkStorageMetadata(torch.Size(_offsets(dtensor)), sizes)


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Tell torch.distributed.checkpoint where this rank's part lies."""
    describe_chunk(dtensor, _offsets(dtensor))


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the parts of all ranks make up the whole.

    Raises:
        LayoutError: they make up another shape.
    """
    found = _assembled(dtensor)[1]
    if found != tuple(dtensor.shape):
        raise LayoutError(
            f"the shards of all ranks make up a tensor of shape {found}; the DTensor says "
            f"{tuple(dtensor.shape)}."
        )


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Make the DTensors in a state dict, nested dicts included, ready for saving and loading.

    State dicts of sharded models and their optimizers are ready as they are; this is for DTensors
    that were computed from theirs. Changed in place and returned. Ranks must hold equal keys.
    """
    for _, value in sorted(_dtensors(state_dict), key=lambda found: found[0]):
        update_uneven_dtensor_chunk_metadata(value)
    return state_dict


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Like `torch.split`, one part after another: each rank keeps what it has of each part.

    Parts are views of this rank's memory, placed as `dtensor` is. update_uneven_dtensor_chunk_meta:
    make them ready for torch.distributed.checkpoint.

    Raises:
        TypeError: not a DTensor, or sections that are not whole numbers.
        ConfigurationError: sections that do not add up to the dimension.
    """
    _check_type(dtensor)
    size = split_size_or_sections
    sections = list(size) if isinstance(size, Sequence) else [size]
    if not all(isinstance(section, int) for section in sections):
        raise TypeError(f"expected a size or sizes of parts, found {size!r}.")
    dim %= dtensor.ndim
    length = dtensor.shape[dim]
    if isinstance(size, int):
        sections = [min(size, length - start) for start in range(0, length, size)]
    if sum(sections) != length:
        raise ConfigurationError(
            f"sections {sections} add up to {sum(sections)}, and dimension {dim} has {length}."
        )
    offsets, local = _offsets(dtensor), local_of(dtensor)
    first, last = offsets[dim], offsets[dim] + local.shape[dim]
    begin = 0
    for section in sections:
        start, end = max(begin, first), min(begin + section, last)
        inside = end > start
        rows = local.narrow(dim, start - first, end - start) if inside else local.narrow(dim, 0, 0)
        shape = (*dtensor.shape[:dim], section, *dtensor.shape[dim + 1 :])
        part = as_dtensor(rows, shape, dtensor.device_mesh, tuple(dtensor.placements))
        if update_uneven_dtensor_chunk_meta:
            part_offset = start - begin if inside else min(max(first - begin, 0), section)
            describe_chunk(part, (*offsets[:dim], part_offset, *offsets[dim + 1 :]))
        yield part
        begin += section


def make_fsdp_dtensor(  # noqa: PLR0917 - the drop-in signature
    local_tensor: torch.Tensor,
    param: nn.Parameter,
    dist_index: DistIndex,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:
    """A DTensor of `local_tensor`, this rank's elements of whole rows, placed as `param` is.

    param: a sharded parameter of a model of this package, which says where rows lie.
    dist_index: the model's. is_sharded_param: False keeps `local_tensor` whole.

    Raises:
        ConfigurationError: not such a parameter, of other sizes, or another index.
        CapabilityNotBuiltError: force_sync_tp_duplicated_param.
    """
    template: Any = param
    index, is_expert = getattr(param, "megatron_fsdp_dist_index", dist_index), expert_scope(param)
    rows = (
        (
            force_sync_tp_duplicated_param,
            CapabilityNotBuiltError,
            "force_sync_tp_duplicated_param is not built: copies along the tensor-parallel axis "
            "are kept equal by their gradients. Leave it at False.",
        ),
        (
            not is_sharded_param and param.numel() != local_tensor.numel(),
            ConfigurationError,
            f"a tensor of {local_tensor.numel()} elements is not all of a parameter of shape "
            f"{tuple(param.shape)}.",
        ),
        (
            not isinstance(template, DTensor),
            ConfigurationError,
            f"make_fsdp_dtensor expects a sharded parameter, found {type(param).__name__}: only "
            "that says where its rows lie. Take it from model.named_parameters().",
        ),
        (
            index is not dist_index or is_expert_param != (is_expert is not None),
            ConfigurationError,
            "make_fsdp_dtensor: dist_index or is_expert_param are not those that the parameter was "
            "sharded with. Pass model.dist_index, and True for parameters of experts alone.",
        ),
    )
    refuse(rows)
    placements = tuple(
        placement if is_sharded_param else Replicate() for placement in template.placements
    )
    own = local_tensor.view(-1, *template.shape[1:]) if template.ndim else local_tensor.view(-1)
    made = as_dtensor(own, tuple(template.shape), template.device_mesh, placements)
    if run_check:
        validate_uneven_dtensor(made)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(made)
    return made


def _check_type(dtensor: object) -> None:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"Input must be a DTensor, got {type(dtensor).__name__}.")


def _offsets(dtensor: DTensor) -> Offsets:
    return _assembled(dtensor)[0]


def _assembled(dtensor: DTensor) -> tuple[Offsets, tuple[int, ...]]:
    """Where this rank's part begins, and the shape that the parts of all ranks make up."""
    _check_type(dtensor)
    agree_to_read([dtensor], "where the rows are")
    mesh, sizes = dtensor.device_mesh, list(local_of(dtensor).shape)
    offsets = [0] * len(sizes)
    for mesh_dim, dim in assembly_order(dtensor.placements):
        counts = row_counts(sizes[dim], mesh.get_group(mesh_dim), dtensor.device)
        offsets[dim] += sum(counts[: mesh.get_local_rank(mesh_dim)])
        sizes[dim] = sum(counts)
    return tuple(offsets), tuple(sizes)


def _dtensors(
    values: Mapping[Any, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], DTensor]]:
    for key, value in values.items():
        if isinstance(value, DTensor):
            yield (*path, str(key)), value
        elif isinstance(value, Mapping):
            yield from _dtensors(value, (*path, str(key)))
