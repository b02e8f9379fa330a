"""FSDP by parametrisation, the idea of SimpleFSDP (arXiv 2411.00284).

Every weight is stored as a DTensor cut along dim 0. Reading it from its module redistributes it:
that is the gather, and its derivative is the reduction. No hooks, no buffers, no streams.

- optim_grads: gathered weights stay in the graph of a microbatch until its backward pass;
- optim_grads_params: what the graph keeps of a gathered weight is a note of where it came from; the
  backward pass gathers again. Compiled, the partitioner must recompute the gathers.
With k microbatches there are k gathers (or 2k of what the backward pass reads) and k reductions per
weight, each by itself; nothing overlaps unless a compiler reorders it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bench.engines.dtypes import TORCH_DTYPES, main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, scaled_backward
from bench.models.initialisation import materialise, takes_meta
from bench.models.sharding import mesh_of
from bench.spec import SHARDED, ResolvedDtypes, ResolvedRun, StrategyName
from examples.engines import refuse_others


class _Gathers:
    """How weights are read: in which dtypes, and what that has sent."""

    def __init__(self, dtypes: ResolvedDtypes, ranks: int) -> None:
        self._compute = TORCH_DTYPES[dtypes.compute]
        self._wire = TORCH_DTYPES[dtypes.grad_comm]
        self.ring = RingBytes(ranks)
        # By storage, whose address is not used again as long as a weak reference exists.
        self._alive: dict[StorageWeakRef, DTensor] = {}
        self._is_noted = False
        self._gathered: dict[StorageWeakRef, int] = {}
        self.most_bytes = 0

    def whole(self, stored: DTensor) -> Tensor:
        """The weight, gathered; its gradient is a sum over ranks, reduced as it comes."""
        dtensor = stored.redistribute(
            placements=[Replicate()], forward_dtype=self._compute, backward_dtype=self._wire
        )
        return dtensor.to_local(grad_placements=[Partial()])

    def recomputed(self, stored: DTensor) -> Tensor:
        """`whole`, of which a compiler keeps nothing for the backward pass."""
        contexts = partial(create_selective_checkpoint_contexts, _recompute)
        found: Tensor = checkpoint(self.whole, stored, use_reentrant=False, context_fn=contexts)
        return found

    def counted(self, stored: DTensor) -> Tensor:
        """`whole`, counted, as is the reduction of its gradient."""
        found = self.whole(stored)
        self._count(stored, found)
        if found.requires_grad:
            found.register_hook(partial(self._reduced, stored))
        if self._is_noted:
            self._alive[StorageWeakRef(found.untyped_storage())] = stored
            self._measure(stored, found)
        return found

    def _count(self, stored: DTensor, found: Tensor) -> None:
        if _is_cut(stored):
            self.ring.gather(_sent_elements(stored) * found.itemsize, found.dtype)

    def _measure(self, stored: DTensor, found: Tensor) -> None:
        """The most bytes of weights that are whole at once."""
        if _is_cut(stored) and stored.device_mesh.size() > 1:
            self._gathered = {
                one: size for one, size in self._gathered.items() if not one.expired()
            }
            self._gathered[StorageWeakRef(found.untyped_storage())] = (
                found.untyped_storage().nbytes()
            )
            self.most_bytes = max(self.most_bytes, sum(self._gathered.values()))

    def _reduced(self, stored: DTensor, _gradient: Tensor) -> None:
        count = self.ring.reduce_scatter if _is_cut(stored) else self.ring.all_reduce
        count(_sent_elements(stored) * self._wire.itemsize)

    @contextmanager
    def regathering(self) -> Iterator[None]:
        """Of a gathered weight, graphs that are built inside keep where it comes from."""
        self._is_noted = True
        try:
            with saved_tensors_hooks(self._keep, self._read):
                yield
        finally:
            self._is_noted = False
            self._alive.clear()

    def _keep(self, tensor: Tensor) -> Any:
        stored = self._alive.get(StorageWeakRef(tensor.untyped_storage()))
        if stored is None or not _is_cut(stored):
            return tensor
        return stored, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _read(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        stored, *view = kept
        with torch.no_grad():
            whole = self.whole(stored)
        self._count(stored, whole)
        self._measure(stored, whole)
        return whole.as_strided(*view)


def _sent_elements(stored: DTensor) -> int:
    """Elements of a whole weight on the wire: DTensor pads dim 0 to equal shards."""
    if not _is_cut(stored):
        return stored.numel()
    ranks, rows = stored.device_mesh.size(), stored.size(0)
    return -(-rows // ranks) * ranks * (stored.numel() // rows)


def _is_cut(stored: DTensor) -> bool:
    """A parameter of shape () is not, and has its gradient all-reduced."""
    return isinstance(stored.placements[0], Shard)


def _recompute(_context: Any, operation: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
    gathers = torch.ops._c10d_functional
    if operation in (gathers.all_gather_into_tensor.default, gathers.wait_tensor.default):
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


class SimpleFsdpEngine(StockEngine):
    """Weights, gradients and optimizer state cut along dim 0, weight by weight.

    Bytes are counted as weights are read and their gradients come; in a compiled graph nobody can.
    """

    def __init__(
        self, model: nn.Module, resolved: ResolvedRun, device: torch.device, backend: str = "none"
    ) -> None:
        strategies: tuple[StrategyName, ...] = ("optim_grads_params", "optim_grads")
        refuse_others(resolved, strategies, main=("fp32", "fp64"))
        self._regathers = "weights" in SHARDED[resolved.strategy]
        self._backend = backend
        self._ranks = resolved.data_parallel
        self._gathers = _Gathers(resolved.dtypes, self._ranks)
        model = model.to(main_dtype(resolved.dtypes))
        self._whole_bytes = TORCH_DTYPES[resolved.dtypes.compute].itemsize * sum(
            p.numel() for p in model.parameters()
        )
        read = self._gathers.counted
        if self._backend == "none":
            self._ring = self._gathers.ring
        else:
            read = self._gathers.recomputed if self._regathers else self._gathers.whole
        _parametrise(model, device, self._ranks, read)
        materialise(model, device)
        super().__init__(model, resolved)
        self._run: Any = model
        if self._backend != "none":
            with _tracing():
                self._run = torch.compile(model, backend=self._backend)

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        scale: float,
        is_last: bool,  # noqa: ARG002 - every microbatch reduces
    ) -> Tensor:
        """Ranks' gradients are added up: each brings its share of the mean."""
        eager = self._gathers.regathering() if self._regathers else nullcontext()
        with eager if self._backend == "none" else _tracing():
            loss = self._run(tokens, targets)
        return scaled_backward(loss, scale / self._ranks)

    def memory_by_category(self) -> dict[str, int | None]:
        """What is stored as measured, and whole weights: all, or what was measured at once.

        Of a compiled graph that gathers again, the compiler knows alone.
        """
        whole: int | None = self._whole_bytes
        if self._regathers:
            whole = self._gathers.most_bytes if self._backend == "none" else None
        return self.persistent_bytes() | {"compute_weights": whole}

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return StockInspection(self.model, autocast=False)

    def code_path(self) -> str:
        """This file: torch has DTensor, and what is made of it is here."""
        return __file__


@takes_meta
def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> SimpleFsdpEngine:
    """Not compiled."""
    return SimpleFsdpEngine(model, resolved, device)


@takes_meta
def traced(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> SimpleFsdpEngine:
    """Compiled by `aot_eager`: traced, and run unchanged."""
    return SimpleFsdpEngine(model, resolved, device, "aot_eager")


@takes_meta
def compiled(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> SimpleFsdpEngine:
    """Compiled by `inductor`."""
    return SimpleFsdpEngine(model, resolved, device, "inductor")


@contextmanager
def _tracing() -> Iterator[None]:
    """The compiler does what torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parametrise(model: nn.Module, device: torch.device, ranks: int, read: Any) -> None:
    """Store each parameter as a DTensor; its module's attribute becomes `read` of it."""
    mesh = mesh_of(device, ranks, outer=1)
    stored: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            if parameter not in stored:
                placement = Shard(0) if parameter.dim() else Replicate()
                cut = distribute_tensor(parameter.detach(), mesh, [placement])
                stored[parameter] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            module._parameters[name] = stored[parameter]
        if own:
            base = type(module)
            reads = {name: property(partial(_read, name, read)) for name in own}
            module.__class__ = type(f"Simple{base.__name__}", (base,), reads)


def _read(name: str, read: Any, module: nn.Module) -> Tensor:
    found: Tensor = read(module._parameters[name])
    return found
