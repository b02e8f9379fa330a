"""Engine `mfsdp`: this project's own core behind its drop-in functions.

Units are those that the model names. The model is cast to the compute dtype and sharded; where that
cast has lost something, the main weights get the FP32 values, so that training starts from what
every other engine starts from. Of a model on the meta device the core shards placeholders
([Note: models on the meta device]), and each rank then writes its main weights.

Microbatches: with one per step, every backward ends its cycle by itself (auto-sync). With more, the
earlier ones run in `no_sync()` and the last in `sync()`; strategies that shard gradients reduce
every microbatch in both, the others once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_core
from bench.engines.dtypes import TORCH_DTYPES, local_tensor
from bench.engines.mfsdp_inspection import MfsdpInspection
from bench.engines.optimizer import build_optimizer, optimizers_of
from bench.engines.protocol import LedgerView
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.models.initialisation import (
    Part,
    give_placeholders,
    initial_values,
    takes_meta,
    write_values,
)
from bench.models.sharding import (
    DATA,
    OUTER,
    TENSOR,
    expert_mesh,
    mesh_of,
    tensor_mesh,
    unit_classes,
)
from bench.spec import (
    SHARDED,
    DtypeName,
    EngineSpec,
    MfsdpSettings,
    ResolvedDtypes,
    ResolvedRun,
    TrainSpec,
)


class CoreAccount:
    """What an engine knows of the core behind it.

    _account: has its `ledger` and its `wire_log`. _prefix: of the names of `model`.
    """

    model: Any
    _account: Any
    _prefix = ""

    def parts(self) -> list[Part]:
        """Rows of the main weights, where the core says that a checkpoint has them."""
        pairs, names = [], {name for name, _ in self.model.named_parameters()}
        for name, shard in self.model.state_dict().items():
            local: Any = shard._local_tensor if name in names else None
            chunks = () if local is None else local.__create_chunk_list__()
            bare = name.removeprefix(self._prefix)
            pairs += [
                Part(bare, local, tuple(chunk.offsets), tuple(shard.shape)) for chunk in chunks
            ]
        return pairs

    def memory_by_category(self) -> dict[str, int]:
        """Highest bytes of each category in the core's ledger, which books every allocation.

        Where one whole copy serves as main and compute weights, the ledger calls all of it compute
        weights. Here the rows that the optimizer updates are main weights, as for other engines.
        """
        categories = self._account.ledger.peak_bytes_by_category()
        if (
            categories["main_weights"]
            or self._account.ledger.host.bytes_by_category()["main_weights"]
        ):
            return categories
        updated = sum(local_tensor(p.data).nbytes for p in self.model.parameters())
        compute = categories["compute_weights"] - updated
        return categories | {"main_weights": updated, "compute_weights": compute}

    def ledger(self) -> LedgerView:
        """The core's own; see `bench.engines.protocol.LedgerView`."""
        return self._account.ledger

    def wire_bytes(self) -> int | None:
        """Sum over the core's log of collectives, padding included."""
        return self._account.wire_log.sent_bytes

    def gathered_bytes(self) -> dict[str, int] | None:
        """From the core's log of collectives."""
        return dict(self._account.wire_log.gathered_bytes)

    def issued(self) -> int:
        """Collectives so far."""
        return self._account.wire_log.issued

    def latest_collectives(self, number: int) -> list[tuple[int, str]]:
        """The last ones in words, each with its number from 1, as `all_gather of layers.0/0`."""
        return [
            (index, f"{issued.operation} of {issued.bucket} ({issued.group})")
            for index, issued in self._account.wire_log.latest(number)
        ]

    def code_path(self) -> str:
        """The package under test."""
        return str(mfsdp_core.__file__)


@takes_meta
class MfsdpEngine(CoreAccount, StockEngine):
    """The wrapped model and its optimizer."""

    _prefix = "module."

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        values = initial_values(model)
        initial = model.state_dict() if values is None and _loses_values(resolved.dtypes) else None
        model = model.to(TORCH_DTYPES[resolved.dtypes.compute])
        give_placeholders(model, device)
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if on_meta and not SHARDED[resolved.strategy]:
            _make_codes(model)
            on_meta = False
        self._accumulates = resolved.microbatches > 1
        switches = resolved.engine.settings_as(MfsdpSettings)
        self._registers = switches.nccl_ub and switches.manual_registration
        self._per_token = switches.per_token_loss
        self._tokens = 0
        self._shares = resolved.microbatches * resolved.data_parallel
        self.model = self._account = mfsdp_core.fully_shard_model(
            model,
            device=device,
            fsdp_unit_modules=unit_classes(model) or None,
            zero_dp_strategy=resolved.strategy,
            outer_dp_sharding_strategy=resolved.engine.outer_strategy,
            mixed_precision_policy=_policy(resolved.dtypes, switches),
            init_model_with_meta_device=on_meta,
            sync_model_each_microbatch=not self._accumulates,
            **_mesh_arguments(resolved.engine, device, model),
            **switches.arguments(),
        )
        if initial is not None:
            self.model.load_state_dict({self._prefix + k: v for k, v in initial.items()})
        if values is not None:
            write_values(values, self.parts())
            self.model.install_optimized_model_weights()

        def build(own: list[nn.Parameter], train: TrainSpec) -> torch.optim.Optimizer:
            on, decoupled = device if switches.cuda_graph else None, switches.decoupled_grad
            optimizer = build_optimizer(own, train, capturable_on=on, decoupled=decoupled)
            is_whole = True if switches.matrices == "whole" else None
            return mfsdp_core.fully_shard_optimizer(optimizer, whole_matrices=is_whole)

        self.optimizer = optimizers_of(model, self.model.parameters(), resolved.train, build)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Gradients are complete and attached after the last microbatch."""
        with self._cycle(is_last):
            loss = self.model(tokens, targets)
            if self._per_token:
                self._tokens = self._shares * targets.numel()
                scale = targets.numel()
            return scaled_backward(loss, scale)

    def captured(self, iteration: Callable[..., Any]) -> Callable[..., Any] | None:
        """`iteration`, captured at its fifth call and then replayed; None without graphs."""
        if not self.model.cuda_graph_mode:
            return None
        return mfsdp_core.CapturedStep(self.model, self.optimizer, iteration)

    def _cycle(self, is_last: bool) -> AbstractContextManager[None]:
        if not self._accumulates:
            return nullcontext()
        return self.model.sync() if is_last else self.model.no_sync()

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """The core's own norm over shards."""
        self._divide_by_tokens()
        return mfsdp_core.clip_grad_norm_(self.model, max_norm)

    def _divide_by_tokens(self) -> None:
        """Once in a step: before the norm, where there is one."""
        if self._tokens:
            self.model.scale_gradients(1 / self._tokens)
            self._tokens = 0

    def optimizer_step(self) -> None:
        """Step on the main weights, then refresh the compute weights."""
        self._divide_by_tokens()
        self.optimizer.step()
        if self._registers:
            self._registers = False
            self.model.param_and_grad_buffer.manual_buffer_registration()

    def close(self) -> None:
        """Take back what was registered with NCCL, before the process group goes."""
        self.model.param_and_grad_buffer.close()

    def pool_plan(self) -> dict[str, Any] | None:
        """The core's own plan, with the slots that units have now."""
        return self.model.pool_plan

    def buffer_registration(self) -> dict[str, Any] | None:
        """What NCCL has registered, group by group; None where nothing was to be."""
        return self.model.buffer_registration

    def transports(self) -> dict[str, str]:
        """What carries the bytes of each group, and why no better transport does."""
        return self.model.transports

    def inspection(self) -> MfsdpInspection:
        """For `mfsdp-bench validate`."""
        return MfsdpInspection(self.model)

    def annotated(
        self, begin: Callable[[str], Any], end: Callable[[Any], object]
    ) -> AbstractContextManager[None]:
        """Ranges of units, gathers and reductions (`mfsdp_core.annotate`)."""
        return mfsdp_core.annotated(self.model, begin, end)


def _policy(dtypes: ResolvedDtypes, engine: MfsdpSettings) -> mfsdp_core.MixedPrecisionPolicy:
    def torch_dtype(name: DtypeName | None) -> torch.dtype | None:
        return None if name is None else TORCH_DTYPES[name]

    return mfsdp_core.MixedPrecisionPolicy(
        main_params_dtype=torch_dtype(dtypes.main_params),
        main_grads_dtype=torch_dtype(dtypes.main_grads),
        grad_comm_dtype=torch_dtype(dtypes.grad_comm),
        reduce_dtype=torch_dtype(dtypes.reduce),
        weight_codec=None
        if engine.recipe == "none"
        else mfsdp_core.Float8Reference(engine.recipe, engine.gather_precision),
    )


def _make_codes(model: nn.Module) -> None:
    """Of layers of Transformer Engine on the meta device, all at once."""
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]


def _loses_values(dtypes: ResolvedDtypes) -> bool:
    """Whether the cast to the compute dtype has rounded values that the main weights can hold."""
    main = TORCH_DTYPES[dtypes.main_params or dtypes.compute]
    compute = TORCH_DTYPES[dtypes.compute]
    return compute != torch.promote_types(compute, torch.float32) and main != compute


def _mesh_arguments(engine: EngineSpec, device: torch.device, model: nn.Module) -> dict[str, Any]:
    """The data-parallel axes, and those of the meshes that a model was cut over."""
    experts, cut = expert_mesh(model), tensor_mesh(model)
    outer = engine.outer_size
    mesh = mesh_of(device, dist.get_world_size(), outer=outer) if cut is None else cut
    arguments: dict[str, Any] = {
        "device_mesh": mesh,
        "dp_shard_dim": DATA,
        "fsdp_group_ag": _gather_group(mesh, engine),
        "expt_device_mesh": experts,
    }
    if cut is not None:
        arguments["tp_dim"] = TENSOR
    if outer > 1:
        nodes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(nodes, node_name())
        check_nodes(nodes)
        arguments |= {"dp_outer_dim": OUTER, "hybrid_fsdp_group": _both_axes(mesh)}
        if experts is not None:
            arguments["hybrid_fsdp_expt_group"] = _both_axes(experts)
    return arguments


def _both_axes(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks of the inner and the outer axis together. Collective."""
    if mesh.ndim == len((OUTER, DATA)):
        return dist.group.WORLD
    return mesh[OUTER, DATA]._flatten("hsdp").get_group()


def node_name() -> str:
    """What this machine is called: by Slurm, by the launcher, else by itself."""
    names = (os.environ.get(name) for name in ("SLURMD_NODENAME", "MFSDP_BENCH_NODE_NAME"))
    return next(filter(None, names), socket.gethostname())


def check_nodes(nodes: Sequence[str]) -> None:
    """Consecutive ranks form an inner axis; they share a node only if its ranks are consecutive.

    Args:
        nodes: the node of each rank.

    Raises:
        UnsupportedError: ranks of a node have others between them, so that the outer axis would
            not run across nodes.
    """
    seen: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        before = seen.get(node, rank - 1)
        if before != rank - 1:
            raise UnsupportedError(
                "outer-axis-across-nodes",
                f"ranks {before} and {rank} are on node {node}, and ranks between them are not, so"
                " the outer axis would not run across nodes; number the ranks node by node (srun"
                " --distribution=block, or torchrun on each node)",
            )
        seen[node] = rank


def _gather_group(mesh: DeviceMesh, engine: EngineSpec) -> dist.ProcessGroup | None:
    """A second group over the ranks of the inner axis, for gathers alone, where it is wanted.

    Collective: every rank makes the groups of all inner axes, in the same order.
    """
    if not engine.settings_as(MfsdpSettings).separate_gather_group:
        return None
    inner = (mesh.mesh_dim_names or ()).index(DATA)
    inner_axes = mesh.mesh.movedim(inner, -1).reshape(-1, mesh.size(inner)).tolist()
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in inner_axes]
    own = next(index for index, ranks in enumerate(inner_axes) if dist.get_rank() in ranks)
    return groups[own]
