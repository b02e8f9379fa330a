"""The drop-in interface: names, order and defaults of upstream's functions, classes and fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp_core
from mfsdp_core import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.sharding import request_of_wrapper
from mfsdp_core.sharding_arguments import OWN_DEFAULTS, ShardingArguments
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import mesh, on_two_axes

NAME = "conv_linear"
#: Arguments of ours, all by keyword.
OWN: dict[str, Any] = {
    "pool_slots": 2,
    "on_double_reduction": "raise",
    "transport": "auto",
    "nested_units": "outermost",
    "prefetch_order": "recorded",
    "allocator": None,
    "unused_parameters": "none",
    "prefetch_budget_bytes": None,
    "check_for_nan_in_grad": False,
    "manual_registration": False,
}
CLASSES = (MixedPrecisionPolicy, DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP)
FUNCTIONS = ("fully_shard_model", "fully_shard", "fully_shard_optimizer")


@pytest.fixture(scope="module")
def upstream() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each optional package that is missing
        return importlib.import_module("megatron_fsdp")


@pytest.mark.needs("megatron_fsdp")
@pytest.mark.parametrize("name", [*FUNCTIONS, *(kind.__name__ for kind in CLASSES)])
def test_arguments_have_upstreams_names_order_and_defaults(upstream: Any, name: str) -> None:
    theirs = inspect.signature(getattr(upstream, name)).parameters
    ours = inspect.signature(getattr(mfsdp_core, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    policy = dataclasses.asdict(upstream.MixedPrecisionPolicy())
    for argument, parameter in theirs.items():
        found = ours[argument].default
        if argument == "mixed_precision_policy":
            assert policy.items() <= dataclasses.asdict(found).items()
        elif parameter.default is not inspect.Parameter.empty:  # ours may have a default more
            assert found == parameter.default, argument
    own = [p for p in ours.values() if p.name not in theirs and p.kind is not p.VAR_KEYWORD]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in own), own


@pytest.mark.parametrize("name", ["fully_shard_model", "fully_shard"])
def test_own_arguments_have_the_defaults_of_the_wrapper(name: str) -> None:
    parameters = inspect.signature(getattr(mfsdp_core, name)).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == OWN == OWN_DEFAULTS


@pytest.mark.needs("megatron_fsdp")
def test_the_wrapper_has_every_method_that_users_call(upstream: Any) -> None:
    public = {name for name in dir(upstream.MegatronFSDP) if not name.startswith("_")}
    # Called by upstream's own hooks alone.
    public -= {"all_gather_and_wait_parameters_ready"}
    assert [name for name in public if not hasattr(MegatronFSDP, name)] == []


@pytest.mark.parametrize("name", ["finish_grad_sync", "start_param_sync", "start_grad_sync"])
def test_an_argument_that_nobody_knows_is_not_swallowed(name: str) -> None:
    with pytest.raises(TypeError):
        inspect.signature(getattr(MegatronFSDP, name)).bind(None, nonsense=True)


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"data_parallel_sharding_strategy": "zero"}, {}, "optim_grads"),
        ({"megatron_fsdp_grad_comm_dtype": torch.bfloat16}, {}, "mixed_precision_policy"),
        ({}, {"fsdp_double_buffer": True}, "fsdp_double_buffer"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    config: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    made = DistributedDataParallelConfig(**config)
    with pytest.raises(ConfigurationError, match=said):
        MegatronFSDP(nn.Linear(2, 2), ddp_config=made, **arguments)
    with pytest.raises(TypeError, match="nonsense"):
        MegatronFSDP(nn.Linear(2, 2), nonsense=True)


@pytest.mark.parametrize("in_config", [True, False])
def test_registering_by_hand_is_asked_for_by_an_argument_or_by_the_configuration(
    in_config: bool,
) -> None:
    config = DistributedDataParallelConfig(nccl_ub=True, fsdp_manual_registration=True)
    given = ShardingArguments(nccl_ub=True, manual_registration=not in_config)
    request = request_of_wrapper(given, None, config if in_config else None)
    assert request.arguments.manual_registration
    registration = request.config.allocation.registration
    assert registration is not None
    assert registration.manual


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    ("strategy", "is_hybrid"), [("optim_grads", False), ("optim_grads_params", True)]
)
def test_the_constructor_shards_as_the_function_does(strategy: str, is_hybrid: bool) -> None:
    """The wrapper as Megatron-LM builds it beside that of `fully_shard_model`: equal gradients."""
    where: dict[str, Any] = {"device_mesh": mesh(4), "dp_shard_dim": "dp"}
    if is_hybrid:
        where = on_two_axes()
        where.pop("outer_dp_sharding_strategy")
    outer = "optim" if is_hybrid else "no_shard"
    units = list(TOYS[NAME].units)
    index = FSDPDistributedIndex(**where, hsdp_outer_dp_shard=is_hybrid)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer
    )
    made = MegatronFSDP(build(NAME), index, config, fsdp_unit_modules=units)
    other = fully_shard_model(
        build(NAME),
        **where,
        fsdp_unit_modules=units,
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        sync_model_each_microbatch=False,
    )
    for model in (made, other):
        loss(model(batch(NAME, dist.get_rank(), 0, torch.float32))).backward()
        model.finish_grad_sync(force_all_reduce=False)
        assert model.ddp_config.data_parallel_sharding_strategy == strategy
        found = model.get_distributed_index()
        assert found is model.dist_index
        assert found.device_mesh.size() == 4
        assert found.hsdp_outer_dp_shard == is_hybrid
        assert model.device == torch.device("cpu")
    for ours, theirs in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    wrong = dataclasses.replace(index, hsdp_outer_dp_shard=not is_hybrid)
    with pytest.raises(ConfigurationError, match="hsdp_outer_dp_shard"):
        MegatronFSDP(build(NAME), wrong, config, fsdp_unit_modules=units)
