"""From the options of a front to a sharded module: what is refused, what is moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mfsdp_core.comm.mesh import dense_axes, expert_axes, target_device
from mfsdp_core.errors import refuse_configuration
from mfsdp_core.events import EventBus
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.options import Options
from mfsdp_core.runtime.build import Environment, build_context
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.meta_init import check_meta_tensors, move_real_tensors
from mfsdp_core.runtime.units import resolve_unit_classes, select_units
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.streams import Streams


def shard_module(module: nn.Module, options: Options) -> tuple[ShardedContext, Environment]:
    """Shard `module` in place, and say where. Collective.

    Raises:
        ConfigurationError: see `Options`, or a module that cannot be sharded.
    """
    classes = resolve_unit_classes(options.fsdp_unit_modules)
    units = select_units(module, classes, nested=options.nested_units == "all")
    check_meta_tensors(
        module,
        allowed=options.init_model_with_meta_device,
        sharded=options.strategy.inner.shards_optimizer,
    )
    _refuse_some(
        module,
        lambda p: offsets_of(p) is not None,
        "are sharded already. A module is sharded once: use the model that this returned, or build "
        "another module.",
    )
    refuse_shared(module)
    environment = environment_of(options)
    refuse_devices_alone(options, environment)
    prepare_tensors(module, environment.streams.device)
    return build_context(module, units, options, environment), environment


def prepare_tensors(
    module: nn.Module, device: torch.device, left_alone: Collection[nn.Parameter] = ()
) -> None:
    """Bring what `module` has to `device`, what is on the meta device or left alone apart.

    Raises:
        ConfigurationError: a parameter without a shape.
    """
    _refuse_some(
        module,
        lambda p: isinstance(p, UninitializedParameter),
        "have no shape before the first forward pass (torch's lazy modules). Run the module once "
        "before sharding it.",
    )
    _say_what_becomes_contiguous(module)
    move_real_tensors(module, device, left_alone)


def refuse_shared(module: nn.Module) -> None:
    """Refuse parameters whose memory is another sharded module's.

    Raises:
        ConfigurationError: there are some.
    """
    _refuse_some(
        module,
        lambda p: getattr(p, "__fsdp_param__", False) and offsets_of(p) is None,
        "are also in a module that is sharded already, whose buffers they are part of. Put both "
        "modules into one, and shard that, or give each module parameters of its own.",
    )


def _refuse_some(module: nn.Module, is_wrong: Callable[[nn.Parameter], bool], what: str) -> None:
    names = [name for name, parameter in module.named_parameters() if is_wrong(parameter)]
    first = names[0] if names else ""
    refuse_configuration([(names, f"{len(names)} parameters (the first is {first}) {what}")])


def _say_what_becomes_contiguous(module: nn.Module) -> None:
    """Warn, once per model, of weights in another memory format (channels_last)."""
    names = [
        name
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
        and not local_tensor(parameter).is_contiguous()
        # One element that is expanded, in place of values that come later, has no format.
        and 0 not in local_tensor(parameter).stride()
    ]
    if names:
        warnings.warn(
            f"{len(names)} parameters (the first is {names[0]}) are not contiguous, as in "
            "channels_last. Sharded weights are whole rows of flat buffers and become contiguous: "
            "results are the same, and the choice of kernels may change.",
            UserWarning,
            stacklevel=5,
        )


def environment_of(options: Options) -> Environment:
    """The meshes and the device that the options name.

    Raises:
        ConfigurationError: they name none that there are.
    """
    dense = dense_axes(options)
    experts = expert_axes(options, dense)
    target = target_device(options.device, dense.mesh)
    return Environment(dense, experts, Streams.of(target), EventBus(), MemoryLedger())


def refuse_devices_alone(options: Options, environment: Environment) -> None:
    """Refuse offload over a process group that does not serve host memory.

    Raises:
        ConfigurationError: there is no backend for it.
    """
    device, host = environment.streams.device, torch.device("cpu")
    wrong = (
        "offload has shards in host memory, which checkpoints and norms of gradients send over "
        f"ranks, and the process group serves {device.type} alone: expected "
        f"init_process_group('cpu:gloo,{device.type}:nccl'), or leave offload out."
    )
    served = {device, *environment.dense.data_group._device_types}
    refuse_configuration([(options.offload and host not in served, wrong)])
