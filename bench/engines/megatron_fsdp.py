"""Engine `megatron_fsdp`: the package megatron-fsdp 0.6.1 behind its first API. CUDA only.

Some behaviour of the package is undone here, so that it starts where the other engines start:
- `fully_shard_optimizer` takes a step with gradients of zeros to make optimizer state, which counts
  as a step and decays weights: it is taken at a learning rate of 0, and its state is dropped;
- main weights are made from weights in the compute dtype: they get the FP32 values afterwards;
- under HFSDP gradients are sums over ranks, not means: its buffers get the factor that they lack.
It has no function for clipping, so the norm is computed over the shards here. It asks for a mesh
dimension of tensor parallelism, here of one rank. Codes of Transformer Engine it makes module by
module. Registration after the first step is a field of its configuration, and no argument.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bench.engines.dtypes import TORCH_DTYPES, local_tensor
from bench.engines.inspection import LocalRows, StockInspection, lacks, local_rows
from bench.engines.optimizer import (
    build_optimizer,
    clip_shards,
    optimizer_state_bytes,
    set_learning_rate,
)
from bench.engines.protocol import UNREPORTED
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.models.initialisation import (
    GivenValues,
    Part,
    give_placeholders,
    initial_values,
    takes_meta,
    write_values,
)
from bench.models.sharding import DATA, OUTER, TENSOR, mesh_of, unit_classes
from bench.spec import (
    SHARDED,
    EngineSpec,
    MegatronFsdpSettings,
    ResolvedDtypes,
    ResolvedRun,
    known_engine,
)


@takes_meta
class MegatronFsdpEngine(StockEngine):
    """The wrapped model and its optimizer. package: what has the functions; a test's stand-in."""

    def __init__(
        self, model: nn.Module, resolved: ResolvedRun, device: torch.device, package: Any = None
    ) -> None:
        self._package = package or importlib.import_module("megatron_fsdp")
        refuse_other_release(resolved.engine.name)
        values = initial_values(model)
        given = GivenValues(model) if values is None else values
        model = model.to(TORCH_DTYPES[resolved.dtypes.compute])
        give_placeholders(model, device)
        self._accumulates = resolved.microbatches > 1
        self.settings = resolved.engine.settings_as(MegatronFsdpSettings)
        self._registers = self.settings.manual_registration
        with _registering_later(self._package) if self._registers else nullcontext():
            self.model: Any = self._package.fully_shard_model(
                model,
                device=device,
                fsdp_unit_modules=unit_classes(model),
                zero_dp_strategy=resolved.strategy,
                outer_dp_sharding_strategy=resolved.engine.outer_strategy,
                mixed_precision_policy=dtype_policy(self._package, resolved.dtypes),
                init_model_with_meta_device=any(p.is_meta for p in model.parameters()),
                sync_model_each_microbatch=not self._accumulates,
                **_mesh_arguments(resolved.engine, device),
                **self.settings.arguments(),
            )
        if SHARDED[resolved.engine.outer_strategy]:
            _average_over_all_ranks(self.model.param_and_grad_buffer.parameter_groups)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self._sharded(
            build_optimizer(self.parameters, resolved.train, decoupled=self.settings.decoupled_grad)
        )
        if values or resolved.dtypes.main_params not in (None, resolved.dtypes.compute):
            write_values(given, self.parts())
            self.model.install_optimized_model_weights()

    def _sharded(self, optimizer: torch.optim.Optimizer) -> Any:
        lr = optimizer.param_groups[0]["lr"]
        set_learning_rate(optimizer, 0.0)
        sharded = self._package.fully_shard_optimizer(optimizer)
        set_learning_rate(sharded, lr)
        sharded.state.clear()
        return sharded

    def parts(self) -> list[Part]:
        """Stretches of the main weights."""
        parts = []
        for name, parameter in self.model.named_parameters():
            start = getattr(parameter, "megatron_fsdp_slice", slice(0)).start or 0
            if parameter.requires_grad:
                rows, shape = local_tensor(parameter.data).view(-1), tuple(parameter.shape)
                parts.append(Part(name.removeprefix("module."), rows, (start,), shape))
        return parts

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Gradients are complete and attached after the last microbatch."""
        with self._cycle(is_last):
            return scaled_backward(self.model(tokens, targets), scale)

    def _cycle(self, is_last: bool) -> AbstractContextManager[None]:
        if not self._accumulates:
            return nullcontext()
        cycle: AbstractContextManager[None] = self.model.sync() if is_last else self.model.no_sync()
        return cycle

    def gradients(self) -> dict[str, Tensor | None]:
        """What the optimizer reads of every trainable parameter, by the name in the bare model."""
        attribute = "decoupled_grad" if self.settings.decoupled_grad else "grad"
        return {
            name.removeprefix("module."): getattr(p, attribute, None)
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """By the norm over all shards: the package has no call for it."""
        gradients = self.gradients().values()
        local = [local_tensor(gradient) for gradient in gradients if gradient is not None]
        device = local_tensor(self.parameters[0]).device
        return clip_shards(local, max_norm, _sharded_over(self.parameters), device)

    def optimizer_step(self) -> None:
        """One update of the main weights; after the first one, buffers are registered if wanted."""
        super().optimizer_step()
        if self._registers:
            self._registers = False
            self.model.param_and_grad_buffer.manual_buffer_registration()

    def memory_by_category(self) -> dict[str, int | None]:
        """Shards that the optimizer sees; buffers for computing and sending are not reported."""
        return UNREPORTED | {
            "main_weights": sum(local_tensor(p.data).nbytes for p in self.parameters),
            "optimizer_state": optimizer_state_bytes(self.optimizer),
        }

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return MegatronFsdpInspection(self, self._package)

    def code_path(self) -> str:
        """The file of the package."""
        return str(self._package.__file__)


class MegatronFsdpInspection(StockInspection):
    """Of the package's DTensors, whose shards along dim 0 are uneven."""

    def __init__(self, engine: MegatronFsdpEngine, package: Any) -> None:
        super().__init__(engine.model, prefix="module.", autocast=False)
        name = f"{package.__name__}.uneven_dtensor"
        self._whole = importlib.import_module(name).uneven_dtensor_to_full_tensor
        self._engine = engine

    def gradients(self) -> dict[str, LocalRows | None]:
        """As the optimizer reads them; an empty shard has none to read."""
        parameters, shards = self._parameters(), {}
        for name, gradient in self._engine.gradients().items():
            is_empty = not local_tensor(parameters[name].data).numel()
            rows = parameters[name].data if is_empty else gradient
            shards[name] = None if rows is None else local_rows(rows, outer_is_finer=True)
        return shards

    def weights(self) -> dict[str, LocalRows]:
        """Those of the optimizer, cut by the inner axis first."""
        parameters = self._parameters().items()
        return {name: local_rows(p.data, outer_is_finer=True) for name, p in parameters}

    def whole_weights(self) -> dict[str, Tensor]:
        """The package's own gather of uneven shards."""
        return {
            name: self._whole(p.detach()) if isinstance(p, DTensor) else p.detach()
            for name, p in self._parameters().items()
        }

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Not offered."""
        raise lacks(f"loads sharded checkpoints, not {len(weights)} whole tensors")


def refuse_other_release(engine: str) -> None:
    """For an arm with packages of its own, which no plan has seen.

    Raises:
        UnsupportedError: the package is here in a release that takes other arguments.
    """
    if other := known_engine(engine).other_release():
        raise UnsupportedError("engine-not-here", other)


def dtype_policy(package: Any, dtypes: ResolvedDtypes) -> Any:
    """The package's own object for `dtypes`."""
    main = dtypes.main_params
    return package.MixedPrecisionPolicy(
        main_params_dtype=None if main is None else TORCH_DTYPES[main],
        main_grads_dtype=TORCH_DTYPES[dtypes.main_grads],
        grad_comm_dtype=TORCH_DTYPES[dtypes.grad_comm],
    )


@contextmanager
def _registering_later(package: Any) -> Iterator[None]:
    """Its configuration leaves registration to the caller."""
    module: Any = importlib.import_module(f"{package.__name__}.fully_shard")
    configuration = module.DistributedDataParallelConfig
    module.DistributedDataParallelConfig = partial(configuration, fsdp_manual_registration=True)
    try:
        yield
    finally:
        module.DistributedDataParallelConfig = configuration


def _average_over_all_ranks(groups: Any) -> None:
    """Buffers that gradients are reduced from under HFSDP lack the factor, and are summed."""
    for group in groups:
        if group.hfsdp_helper_gbuf is not None:
            factor = group.main_grad_buffer.gradient_scaling_factor
            group.hfsdp_helper_gbuf.gradient_scaling_factor = factor


def _mesh_arguments(engine: EngineSpec, device: torch.device) -> dict[str, Any]:
    """One axis of data, or two where an outer one is wanted, and one rank of tensor parallelism."""
    mesh = mesh_of(device, dist.get_world_size(), outer=engine.outer_size, last=TENSOR)
    own = {"device_mesh": mesh, "dp_shard_dim": DATA, "tp_dim": TENSOR}
    if engine.outer_size == 1:
        return own
    return own | {"dp_outer_dim": OUTER, "hybrid_fsdp_group": dist.group.WORLD}


def _sharded_over(parameters: Sequence[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Groups of the mesh axes that parameters are cut over; they share one mesh."""
    first = parameters[0]
    if not isinstance(first, DTensor):
        return []
    return [
        first.device_mesh.get_group(axis)
        for axis, placement in enumerate(first.placements)
        if not isinstance(placement, Replicate)
    ]
