"""Memory and initial values of a model that was built without them.

[Note: models on the meta device] A model is built there, and carries the rule of its values,
`initial_values` ([Note: one start]). An engine that takes such a model (`takes_meta` of its
factory) shards it and lets each rank write its own part. Where a package shards real tensors alone,
it gets placeholders: one element in memory, expanded to the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bench.models.initial_values import InitialValues

F = TypeVar("F", bound=Callable[..., Any])


class Part(NamedTuple):
    """This rank's part of a parameter, by its name in the bare model.

    rows: the memory. offsets: of its first element, one for each dim of `rows`; of a flat part of
    a parameter of more dims, the number of that element. shape: of the parameter.
    """

    name: str
    rows: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def takes_meta(factory: F) -> F:
    """Mark what builds an engine: it is given models on the meta device as they are."""
    factory.takes_meta = True  # type: ignore[attr-defined]
    return factory


def initial_values(model: nn.Module) -> InitialValues | None:
    """The rule of a model on the meta device; None of one that has values already."""
    values: InitialValues | None = getattr(model, "initial_values", None)
    return values if any(parameter.is_meta for parameter in model.parameters()) else None


class GivenValues:
    """Values that a model has, copied, for engines that round or move them."""

    def __init__(self, model: nn.Module) -> None:
        self._whole = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fill_part_(self, out: Tensor, name: str, offsets: Sequence[int]) -> None:
        """As `InitialValues.fill_part_`, of flat parts."""
        (start,) = offsets
        out.copy_(self._whole[name].flatten()[start : start + out.numel()])


def parts_of(named: Iterable[tuple[str, nn.Parameter]], prefix: str = "") -> list[Part]:
    """Parts of plain tensors and of DTensors that are cut as torch cuts them."""
    parts = []
    for name, parameter in named:
        rows, offsets = parameter.detach(), (0,) * parameter.dim()
        if isinstance(rows, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape, rows.device_mesh, rows.placements
            )
            rows = rows.to_local()
        bare, shape = name.removeprefix(prefix), tuple(parameter.shape)
        parts.append(Part(bare, rows, tuple(offsets), shape))
    return parts


def write_values(values: InitialValues | GivenValues, parts: Iterable[Part]) -> None:
    """Let every part begin as `values` say."""
    for part in parts:
        values.fill_part_(part.rows, part.name, part.offsets)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters of `model` on the meta device, sharded or not, memory and values."""
    values = initial_values(model)
    if values is None:
        return
    waiting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    _replace_meta(model, lambda meta: torch.empty_like(meta, device=device))
    named = (entry for entry in model.named_parameters() if entry[0] in waiting)
    write_values(values, parts_of(named))


def give_placeholders(model: nn.Module, device: torch.device) -> None:
    """Give parameters of `model` on the meta device a shape on `device`, and no memory.

    Those that become codes of Transformer Engine stay there: the core makes them unit by unit.
    """

    def placeholder(meta: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=meta.dtype, device=device)
        if not isinstance(meta, DTensor):
            return zero.expand(meta.shape)
        return DTensor.from_local(
            zero.expand(meta.to_local().shape),
            meta.device_mesh,
            meta.placements,
            run_check=False,
            shape=meta.shape,
            stride=meta.stride(),
        )

    _replace_meta(model, placeholder, but=becomes_codes)


def becomes_codes(module: nn.Module, meta: Tensor) -> bool:
    """Whether a parameter of `module` is a matrix of a layer under `quantized_model_init`."""
    return bool(getattr(module, "primary_weights_in_fp8", False)) and meta.dim() > 1


def _replace_meta(
    model: nn.Module,
    make: Callable[[Any], Tensor],
    but: Callable[[nn.Module, Tensor], bool] = lambda _module, _meta: False,
) -> None:
    """Tied parameters stay one, and keep their attributes."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, meta in list(module._parameters.items()):
            if meta is None or not meta.is_meta or but(module, meta):
                continue
            if id(meta) not in made:
                real = nn.Parameter(make(meta.detach()), requires_grad=meta.requires_grad)
                vars(real).update({k: v for k, v in vars(meta).items() if k not in vars(real)})
                made[id(meta)] = real
            module._parameters[attribute] = made[id(meta)]
