"""Gathers by hooks that a weight brings along, as a codec; see `mfsdp_core.shard.gather_hooks`.

    main rows, padding included --first hook--> inputs --gather--> outputs --second hook--> raw

The hooks run at every gather, on the main weights as they are then, so that a scale computed after
the optimizer's step counts. The outputs are what modules compute with: no full buffer exists
besides. They keep their storage object, which comes and goes, since the second hook may rely on
`raw` being over the same memory as at the first gather. That gather is made when the bucket is
built, because `raw` is what it returns.

One weight has a bucket of its own, so that its shards are even, and padded with zeros behind the
last row, as the first hook expects of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.precision.codec import Shard
from mfsdp_core.shard.gather_hooks import POST, PRE, has_gather_hooks, options_of, with_values


class HookedBucket:
    """Calls the hooks of the one weight of a bucket.

    name: of the bucket. mesh: ranks that shard it, one axis. shape: of the whole. module: that
    holds it. dtype: in which modules compute.
    raw: the parameter that modules compute with, once something was gathered. made: tensors inside
    it that the second hook has allocated; their memory comes and goes with what was gathered.
    """

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        shard: Shard,
        *,
        shape: torch.Size,
        module: nn.Module,
        dtype: torch.dtype,
    ) -> None:
        self._name = name
        self._mesh, self._shape, self._module, self._dtype = mesh, shape, module, dtype
        self._is_whole = shard.slices == shard.layout.slices
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._metadata: Any = None
        self._inner: tuple[torch.Tensor, ...] = ()
        self._sharded: Any = None
        self.raw: nn.Parameter | None = None
        self.made: list[torch.Tensor] = []

    def start(self, sharded: nn.Parameter) -> None:
        """Before the first gather: the DTensor whose local tensor has the hooks.

        Raises:
            ConfigurationError: the tensor with hooks does not survive inside of a DTensor.
        """
        self._sharded = sharded
        if not has_gather_hooks(self.local):
            raise ConfigurationError(
                f"{self._name}: a tensor with gather hooks does not stay one through detach "
                f"and view, found {type(self.local).__name__}. Its dispatch must keep the class."
            )

    @property
    def local(self) -> torch.Tensor:
        """What brings the hooks: the rows of the main weights, in their own kind of tensor."""
        local: torch.Tensor = self._sharded._local_tensor
        return local

    @torch.no_grad()
    def encode(self, main: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        """Add what the first hook sends of the shard, padding included, to `parts`."""
        local, shape = self.local, self._shape
        rows = main.view(-1, *shape[1:])
        shard = with_values(local, rows[: shape[0]] if self._is_whole else rows)
        vars(shard).update(options_of(local))  # what was set on the parameter's
        inputs, self._metadata = self._before(shard)
        forms = [(tensor.shape[1:], tensor.dtype) for tensor in inputs]
        if forms != (self._forms or forms):
            raise LifecycleError(
                f"{self._name}: hooks of {type(local).__name__} want to gather tensors of (row, "
                f"dtype) {forms}, and gathered {self._forms} before. Expected the same."
            )
        self._forms = forms
        for number, tensor in enumerate(inputs):
            parts[f"gathered {number}"] = _as_bytes(tensor.contiguous().view(-1))

    @torch.no_grad()
    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Let the second hook make `raw` of what has arrived, or update it."""
        del direction, weights
        outputs = tuple(
            data.data.view(dtype).view(-1, *row)
            for data, (row, dtype) in zip(gathered.values(), self._forms, strict=True)
        )
        after = getattr(self.local, POST)
        if self.raw is not None:
            # The same values again are no change of what autograd has saved.
            known = (self.raw, *self._inner)
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(known):
                after(outputs, self._metadata, self._dtype, out=self.raw)
            return
        made, inner = after(outputs, self._metadata, self._dtype)
        self._inner = tuple(inner)
        shape = self._shape
        stride = torch.empty(shape, device="meta").stride()
        view = torch.as_strided(made, shape, stride, 0)
        self.raw = nn.Parameter(view, requires_grad=self._sharded.requires_grad)
        memory = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        self.made = [t for t in inner if t.untyped_storage().data_ptr() not in memory]

    def forget(self) -> None:
        """Drop what the first hook has left for the second."""
        self._metadata = None

    def _before(self, shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Call the first hook of `shard`, in the form that it has.

        Raises:
            ConfigurationError: a form that torch does not know either.
        """
        hook = getattr(shard, PRE)
        parameters = len(inspect.signature(hook).parameters)
        if parameters == 1:
            inputs, metadata = hook(self._mesh)
        elif parameters == 5:  # noqa: PLR2004 - of the newer form in `shard.gather_hooks`
            from torch.distributed.fsdp import MixedPrecisionPolicy

            policy = MixedPrecisionPolicy(param_dtype=self._dtype)
            stride = torch.empty(self._shape, device="meta").stride()
            inputs, metadata = hook(self._mesh, self._shape, stride, self._module, policy)
        else:
            raise ConfigurationError(
                f"{type(shard).__name__}.{PRE}{inspect.signature(hook)}: expected (mesh), or "
                "(mesh, outer_size, outer_stride, module, mp_policy)."
            )
        rows = [tensor.shape[0] if tensor.ndim else None for tensor in inputs]
        if not rows:
            raise ConfigurationError(
                f"{type(shard).__name__}.{PRE} returned no tensors: expected one or more to gather."
            )
        if any(count != shard.shape[0] for count in rows):
            raise ConfigurationError(
                f"{type(shard).__name__}.{PRE} returned tensors of {rows} rows for a shard of "
                f"{shard.shape[0]}, padding included: expected as many."
            )
        return tuple(inputs), metadata


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that every backend sends: gloo knows no 8-bit floats."""
    is_small_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_small_float else tensor
