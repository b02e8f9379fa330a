"""The table of engines. To add one: a row here, and the module that its factory is in.

    class Engine                what `factory` names or builds: `bench.engines.protocol`
    its own settings            a model of single values, here, so that a plan needs no torch
    everything else             columns of `EngineRow`

An engine of another package is a row too: an entry point of the group `mfsdp_bench.engines` whose
value is an `EngineRow` in a module that loads no torch.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from bench.spec.engine_row import DtypePolicies, EngineRow, EngineSettings
from bench.spec.names import (
    DEFAULT_TRANSPORT,
    STRATEGIES,
    AllocatorName,
    GatherPrecisionName,
    RecipeName,
    TransportName,
)


class MegatronSwitches(EngineSettings):
    """What megatron-fsdp and this project's core can both be told, under the core's names."""

    overlap_param_gather: bool = True
    """Gather the weights of the next unit while this one computes."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass goes on."""
    average_in_collective: bool = False
    """Average in the collective rather than scale gradients first."""
    nccl_ub: bool = False
    """Register communication buffers with NCCL."""
    symmetric_registration: bool = True
    """Register them as symmetric windows rather than plain buffers."""
    double_buffer: bool = False
    """Serve units from a pool of slots."""
    persistent_fallback: bool = False
    """A buffer that fits no slot stays for good."""
    fine_grained_gather: bool | None = None
    """Gather module by module; null follows the rule of the recipe and the model."""
    decoupled_grad: bool = False
    """Hand gradients to the optimizer in a dtype of their own."""
    nan_check: bool = False
    """Look for NaN and Inf in every gradient of a parameter as it comes."""

    def arguments(self) -> dict[str, Any]:
        """Under the names of `fully_shard_model`, which both have."""
        return {
            "overlap_param_gather": self.overlap_param_gather,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "average_in_collective": self.average_in_collective,
            "nccl_ub": self.nccl_ub,
            "disable_symmetric_registration": not self.symmetric_registration,
            "fsdp_double_buffer": self.double_buffer,
            "fsdp_db_use_persist_buf_on_alloc_fail": self.persistent_fallback,
            "enable_fine_grained_param_gather": bool(self.fine_grained_gather),
            "use_decoupled_grad": self.decoupled_grad,
            "report_nan_in_param_grad": self.nan_check,
        }


class MfsdpSettings(MegatronSwitches):
    """Switches of `mfsdp_core`, under the names of this harness."""

    allocator: AllocatorName = "storage_resize"
    """Who serves the buffers that come and go with a unit."""
    manual_registration: bool = False
    """Register user buffers after the first step rather than before it."""
    transport: TransportName = DEFAULT_TRANSPORT
    """What carries the bytes; auto chooses by host and device."""
    separate_gather_group: bool = False
    """Gather weights over a second process group."""
    pool_slots: int = Field(default=2, ge=2, le=1024)
    """Slots of a pool."""
    recipe: RecipeName = "none"
    """How matrices are quantised on their way."""
    gather_precision: GatherPrecisionName = "recipe"
    """What travels then: codes of the recipe, or weights that are quantised on arrival."""
    cuda_graph: bool = False
    """Capture a whole step as a CUDA graph, once, and replay it."""
    per_token_loss: bool = False
    """Add the gradients of all tokens up and divide once by their number."""


class Fsdp2Settings(EngineSettings):
    """Switches of `fully_shard`, under its names."""

    reshard_after_forward: int | None = Field(default=None, ge=2)
    """Between the passes a layer is kept in parts of this many ranks; null follows the strategy."""


class MegatronFsdpSettings(MegatronSwitches):
    """Switches of megatron-fsdp 0.6.1, where nccl_ub turns the double buffer on."""

    disable_bucketing: bool = False
    """Send each gradient by itself."""
    max_pool: bool = False
    """A double buffer for units of unequal size."""


# Torch's own engines keep gradients in the dtype of their parameters. They are matched to mfsdp on
# FP32 main weights, or on FP64 throughout as a reference: fsdp2 through MixedPrecisionPolicy, ddp
# and single by autocast, ddp's wire dtype by a communication hook.
_AUTOCAST = DtypePolicies(main=("fp32", "fp64"), gradients_as_main=True, autocast=("bf16", "fp16"))

# The most widely used and simplest first: a report compares with the first that it finds.
TABLE: Final[tuple[EngineRow, ...]] = (
    EngineRow(
        name="ddp",
        factory="bench.engines.ddp:DdpEngine",
        summary="torch's DistributedDataParallel",
        strategies=("no_shard",),
        dtypes=DtypePolicies(_AUTOCAST.main, True, _AUTOCAST.autocast, wire=("bf16", "fp16")),
        code=("bench/engines/ddp.py",),
        torch_code=("torch/nn/parallel/**/*.py",),
        colour="#E69F00",
        established=True,
    ),
    EngineRow(
        name="single",
        factory="bench.engines.single:SingleEngine",
        summary="plain autograd in one process",
        strategies=("no_shard",),
        one_process=True,
        dtypes=DtypePolicies(_AUTOCAST.main, True, _AUTOCAST.autocast, wire=()),
        code=("bench/engines/single.py",),
        colour="#000000",
        established=True,
    ),
    EngineRow(
        name="fsdp2",
        factory="bench.engines.fsdp2:Fsdp2Engine",
        summary="torch's fully_shard",
        settings=Fsdp2Settings,
        # reshard_after_forward True and False.
        strategies=("optim_grads_params", "optim_grads"),
        outer_axis=True,
        hybrids=(("optim_grads_params", "no_shard"), ("optim_grads", "no_shard")),
        parallel=("tensor_parallel",),
        dtypes=DtypePolicies(_AUTOCAST.main, True),
        code=("bench/engines/fsdp2.py",),
        torch_code=("torch/distributed/fsdp/**/*.py",),
        colour="#0072B2",
        established=True,
    ),
    EngineRow(
        name="megatron_fsdp",
        factory="bench.engines.megatron_fsdp:MegatronFsdpEngine",
        summary="the package megatron-fsdp 0.6.1",
        settings=MegatronFsdpSettings,
        strategies=("optim_grads_params", "optim_grads", "optim", "no_shard"),
        outer_axis=True,
        hybrids=(
            *((inner, "no_shard") for inner in STRATEGIES),
            ("optim_grads_params", "optim"),
        ),
        devices=("cuda",),
        needs=("torch", "einops", "megatron_fsdp"),
        install="pip install --no-deps megatron-fsdp==0.6.1 einops",
        code=("bench/engines/megatron_fsdp.py",),
        torch_code=("megatron_fsdp/**/*.py",),
        colour="#009E73",
    ),
    EngineRow(
        name="megatron_fsdp_v2",
        factory="bench.engines.megatron_fsdp_v2:MegatronFsdpV2Engine",
        summary="megatron_fsdp.experimental, the second version in megatron-fsdp 0.6.1",
        strategies=("optim_grads_params",),
        outer_axis=True,
        hybrids=(("optim_grads_params", "no_shard"),),
        dtypes=DtypePolicies(sends_as_computed=True),
        devices=("cuda",),
        needs=("torch", "einops", "megatron_fsdp"),
        install="pip install --no-deps megatron-fsdp==0.6.1 einops",
        code=("bench/engines/megatron_fsdp_v2.py", "bench/engines/megatron_fsdp.py"),
        torch_code=("megatron_fsdp/**/*.py",),
        colour="#999999",
    ),
    EngineRow(
        name="mfsdp",
        factory="bench.engines.mfsdp:MfsdpEngine",
        summary="this project's core",
        settings=MfsdpSettings,
        strategies=("optim_grads_params", "optim_grads", "optim", "no_shard"),
        outer_axis=True,
        parallel=("tensor_parallel", "expert_parallel"),
        dtypes=DtypePolicies(sums=True),
        code=(
            "bench/engines/mfsdp.py",
            "bench/engines/mfsdp_inspection.py",
            "mfsdp_core/**/*.py",
        ),
        colour="#D55E00",
    ),
)
