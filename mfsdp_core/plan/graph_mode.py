"""`cuda_graph_mode`: what a step that is captured once and replayed must not do."""

from __future__ import annotations

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.config import ShardingConfig


def check_graph_mode(config: ShardingConfig, *, has_codec: bool) -> None:
    """Refuse what reads memory on the host, or lets buffers move, within a step.

    Raises:
        ConfigurationError: names every such argument.
    """
    allocation = config.allocation
    registration = allocation.registration
    transport = config.reduction.transport
    reasons = {
        f"allocator={allocation.allocator!r} gives buffers back and gets others; use "
        "fsdp_double_buffer=True (or maxpool_double_buffer=True)": allocation.pool is None,
        "report_nan_in_param_grad and check_for_nan_in_grad read gradients on the host; look at "
        "the loss between steps instead": config.checks.each_parameter
        or config.checks.before_reduction,
        f"transport={transport!r} exchanges messages from the host; use 'native'": (
            transport == "point_to_point"
        ),
        "weight_codec: recipes were never captured": has_codec,
        "nccl_ub with symmetric windows: graphs of symmetric kernels are known to be unreliable "
        "(NVIDIA/Megatron-LM#6154); add disable_symmetric_registration=True": (
            registration is not None and registration.symmetric
        ),
        "manual_registration registers memory after the first steps; leave it out": (
            registration is not None and registration.manual
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigurationError(
            "cuda_graph_mode=True captures a step once and replays it. " + ". ".join(found) + "."
        )
