"""Weights that Transformer Engine keeps as codes alone (primary weights), as a codec.

    main rows --quantize_master_weights--> this rank's codes --gather--> codes of the whole weight,
                                                                         which its tensor looks at

Layers made under `transformer_engine.pytorch.quantized_model_init` have such parameters. Modules
compute with the same tensor objects as before: only the memory of their codes is the core's, and
comes and goes. Scales of whole weights are known to every rank, since Transformer Engine takes
their maxima over the ranks itself, also on those that hold no part of a weight. Columns that are a
copy of the rows are made for backward passes, and dropped with the weights unless
`keep_fp8_transpose_cache` is set; those of MXFP8 are codes of their own, and gathered.

Transformer Engine is imported where a model has such a parameter. Names and signatures are those of
release 2.20; `tests/core/test_transformer_engine_interface.py` compares them with an installed one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import BOTH, Payload
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.precision.codec import Shard

_TENSORS = "transformer_engine.pytorch.quantized_tensor"
_FUNCTIONS = "transformer_engine.pytorch.tensor.utils"

#: By class of the tensor: the attributes with codes that are gathered, and the passes that read
#: them. A byte per weight each.
GATHERED: Mapping[str, tuple[tuple[str, frozenset[Direction]], ...]] = {
    "Float8Tensor": (("_data", BOTH),),
    "Float8BlockwiseQTensor": (("_rowwise_data", BOTH),),
    "MXFP8Tensor": (
        ("_rowwise_data", frozenset({"forward"})),
        ("_columnwise_data", frozenset({"backward"})),
    ),
}
#: By class of the recipe: what its weights become.
_KINDS: Mapping[str, str] = {
    "DelayedScaling": "Float8Tensor",
    "Float8CurrentScaling": "Float8Tensor",
    "Float8BlockScaling": "Float8BlockwiseQTensor",
    "MXFP8BlockScaling": "MXFP8Tensor",
    "NVFP4BlockScaling": "NVFP4Tensor",
}
_HIGH_PRECISION = ("get_high_precision_init_val", "clear_high_precision_init_val")


def is_primary(tensor: torch.Tensor) -> bool:
    """Whether Transformer Engine keeps the values of `tensor`. Never imports it."""
    module: Any = sys.modules.get(_TENSORS)
    return module is not None and isinstance(tensor, module.QuantizedTensor)


def primary_kind(module: Any, weight: torch.Tensor) -> str:
    """The class that `weight` has, or gets when `module` leaves the meta device; "" for plain ones.

    Layers under `quantized_model_init` on the meta device have plain weights until they are reset;
    of their parameters the matrices become codes.
    """
    if is_primary(weight):
        return type(weight).__name__
    quantises = getattr(module, "primary_weights_in_fp8", False)
    if not (quantises and weight.is_meta and weight.dim() > 1):
        return ""
    recipe = type(module.fp8_meta["recipe"]).__name__
    return _KINDS.get(recipe, recipe)


def check_primary(name: str, weight: torch.Tensor, kind: str) -> None:
    """Refuse what cannot be sharded as codes. kind: of `primary_kind`.

    Raises:
        CapabilityNotBuiltError: a kind of tensor that is not built.
        ConfigurationError: its columns were never made.
    """
    if kind not in GATHERED:
        raise CapabilityNotBuiltError(
            f"{name} is a {kind} of Transformer Engine. Weights that are kept as codes alone are "
            f"built for {', '.join(GATHERED)}. Use another recipe in quantized_model_init(), or "
            "make the model outside of it: layers then quantise weights that travel as they are."
        )
    if weight.is_meta:
        return
    missing = [attribute for attribute, _ in GATHERED[kind] if getattr(weight, attribute) is None]
    if missing:
        raise ConfigurationError(
            f"{name}, a {kind}, has no {', '.join(missing)}, which backward passes read. Make the "
            "model with gradients enabled."
        )


def has_drawn_values(weight: torch.Tensor) -> bool:
    """Whether `weight` has kept the values that it was rounded from."""
    get = getattr(weight, _HIGH_PRECISION[0], None)
    return get is not None and get() is not None


def take_drawn_values(weight: Any) -> torch.Tensor:
    """Those values; `weight` keeps them no longer."""
    values: torch.Tensor = weight.get_high_precision_init_val()
    weight.clear_high_precision_init_val()
    return values


def initial_values(name: str, weight: Any) -> torch.Tensor:
    """The values that main weights begin with, [shape of the weight]; perhaps on the CPU."""
    values: torch.Tensor
    if has_drawn_values(weight):
        values = weight.get_high_precision_init_val()
    else:
        warnings.warn(
            f"main weights of {name} begin with decoded FP8 values, since nothing else is there. "
            "quantized_model_init(preserve_high_precision_init_val=True) keeps the drawn ones.",
            RuntimeWarning,
            stacklevel=2,
        )
        values = weight.dequantize(dtype=torch.float32)
    return values


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Attributes of a parameter, without what a quantised tensor is made of."""
    if not is_primary(parameter):
        return vars(parameter)
    made_of = {*vars(parameter.detach()), *_HIGH_PRECISION, "_high_precision_init_val"}
    return {name: value for name, value in vars(parameter).items() if name not in made_of}


def payloads_of(kind: str, layout: Layout) -> tuple[Payload, ...]:
    """The codes of each direction. kind: of the tensors, by name of the class."""
    size = layout.slice_elements
    return tuple(
        Payload(name, "uint8", size, directions, "use") for name, directions in GATHERED[kind]
    )


class PrimaryBucket:
    """Quantises this rank's rows, and shows the tensors where their codes are.

    weights: the tensors, all of one kind. group: all ranks that shard the optimizer, over which
    scales agree. keeps_copies: columns that are a copy of the rows stay between uses.
    """

    def __init__(
        self, weights: Sequence[Any], group: ProcessGroup, shard: Shard, *, keeps_copies: bool
    ) -> None:
        self._weights = weights
        self._group = group
        self._layout = shard.layout
        self._owned = range(shard.first_slice, shard.first_slice + shard.slices)
        self._functions = _functions()
        has_copies = len(GATHERED[type(weights[0]).__name__]) == 1
        self._drops_copies = has_copies and not keeps_copies

    def encode(self, main: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's codes, and the scales of all. Collective, whatever the rank holds."""
        weights = list(self._weights)
        masters: list[torch.Tensor | None] = [None] * len(weights)
        starts: list[int | None] = [None] * len(weights)
        codes: list[Any] = [None] * len(weights)
        for rows in self._layout.all_in(self._owned):
            masters[rows.index] = main[rows.where]
            starts[rows.index] = rows.first_row * rows.columns
            found = tuple(part[rows.where] for part in parts.values())
            codes[rows.index] = found[0] if len(found) == 1 else found
        self._functions.quantize_master_weights(weights, masters, starts, self._group, codes)

    def forget(self) -> None:
        """Nothing: maxima lie in the quantisers of its tensors, which a load does not touch."""

    def show(self, gathered: Mapping[str, torch.Tensor]) -> None:
        """Let the tensors look at these codes, [layout.total_elements] per attribute."""
        for name, data in gathered.items():
            for slot, weight in zip(self._layout.slots, self._weights, strict=True):
                setattr(weight, name, data[slot.offset : slot.end].view(slot.shape))

    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Nothing is decoded: modules compute with the codes. Columns are made where missing."""
        del weights
        self.show(gathered)
        if direction == "backward":
            self._functions.post_all_gather_processing(list(self._weights))

    def drop_copies(self) -> None:
        """Free columns that can be made again."""
        for weight in self._weights if self._drops_copies else ():
            self._functions.clear_columnwise_cache(weight)


def _functions() -> Any:
    import importlib

    module = importlib.import_module(_FUNCTIONS)
    wanted = ("quantize_master_weights", "post_all_gather_processing", "clear_columnwise_cache")
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        raise ConfigurationError(
            f"{_FUNCTIONS} has no {', '.join(missing)}: expected Transformer Engine 2.20 or newer."
        )
    return module
