"""The drop-in interface: names, order and defaults of upstream's functions, classes and fields."""

from __future__ import annotations

import dataclasses
import importlib.util
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
from oracle.sharded import STRATEGIES

NAME = "conv_linear"
#: Arguments of upstream's wrapper class, in order, with their defaults.
WRAPPER: dict[str, Any] = {
    "mixed_precision_policy": MixedPrecisionPolicy(),
    "fsdp_unit_modules": None,
    "disable_bucketing": False,
    "device": None,
    "calculate_per_token_loss": False,
    "init_model_with_meta_device": False,
    "sync_model_each_microbatch": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather_hook": False,
    "enable_fine_grained_param_gather_backward_hook": False,
    "fine_grained_recurse_module_types": None,
    "report_nan_in_param_grad": False,
}
#: Fields of upstream's index, which are arguments of its constructor.
INDEX = [
    "device_mesh",
    "dp_shard_dim",
    "dp_outer_dim",
    "tp_dim",
    "hybrid_fsdp_group",
    "hybrid_fsdp_expt_group",
    "hsdp_outer_dp_shard",
    "expt_device_mesh",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
]
SHARED_DEFAULTS: dict[str, Any] = {
    "device_mesh": None,
    "dp_shard_dim": None,
    "dp_outer_dim": None,
    "tp_dim": None,
    "hybrid_fsdp_group": None,
    "hybrid_fsdp_expt_group": None,
    "expt_device_mesh": None,
    "fsdp_group_ag": None,
    "expt_fsdp_group_ag": None,
    "fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "outer_dp_sharding_strategy": 0,
    "device": None,
    "init_model_with_meta_device": False,
    "mixed_precision_policy": MixedPrecisionPolicy(),
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "sync_model_each_microbatch": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "report_nan_in_param_grad": False,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather": False,
    "use_decoupled_grad": False,
    "cuda_graph_mode": False,
    "maxpool_double_buffer": False,
}
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
POSITIONAL = {
    "fully_shard_model": ["module"],
    "fully_shard": ["module", "optimizer"],
    "fully_shard_optimizer": ["optimizer"],
}
WRAPPER_METHODS = (
    "no_sync",
    "sync",
    "set_model_auto_sync",
    "start_param_sync",
    "start_grad_sync",
    "finish_grad_sync",
    "synchronize_param_gather",
    "synchronize_gradient_reduce",
    "attach_grad_to_optimizer_state",
    "zero_grad_buffer",
    "install_optimized_model_weights",
    "broadcast_params",
    "scale_gradients",
    "reset_mixed_precision_policy",
    "mixed_precision_context",
)


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def upstream() -> Any:
    if importlib.util.find_spec("megatron_fsdp") is None:
        pytest.skip("megatron_fsdp 0.6.1 is not installed, so signatures are compared with a table")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each optional package that is missing
        return importlib.import_module("megatron_fsdp")


@pytest.mark.parametrize("name", ["fully_shard_model", "fully_shard"])
def test_arguments_have_upstreams_names_order_and_defaults(name: str) -> None:
    """Own ones are named by keyword, and have the defaults of the wrapper class."""
    function = getattr(mfsdp_core, name)
    expected = [*POSITIONAL[name], *SHARED_DEFAULTS]
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(expected)] == expected
    assert defaults_of(function) == SHARED_DEFAULTS | OWN
    ours = {p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert ours == OWN.keys()
    assert OWN == OWN_DEFAULTS


def test_the_optimizer_function_has_upstreams_signature() -> None:
    function = mfsdp_core.fully_shard_optimizer
    assert list(inspect.signature(function).parameters) == [
        "optimizer",
        "preproc_state_dict_for_dcp_ckpt",
    ]
    assert defaults_of(function) == {"preproc_state_dict_for_dcp_ckpt": True}


def test_the_policy_has_upstreams_fields_and_defaults() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(MixedPrecisionPolicy)}
    assert fields == {
        "main_params_dtype": torch.float32,
        "main_grads_dtype": None,
        "grad_comm_dtype": None,
        "reduce_dtype": None,  # ours, keyword-only, behind theirs, as the next one
        "weight_codec": None,
    }


def test_the_wrapper_has_every_method_that_users_call() -> None:
    assert [m for m in WRAPPER_METHODS if not callable(getattr(MegatronFSDP, m, None))] == []


CLASSES = (MixedPrecisionPolicy, DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP)


@pytest.mark.parametrize("name", [*POSITIONAL, *(kind.__name__ for kind in CLASSES)])
def test_signatures_equal_those_of_the_installed_package(name: str) -> None:
    theirs = inspect.signature(getattr(upstream(), name)).parameters
    ours = inspect.signature(getattr(mfsdp_core, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


def test_the_constructor_has_upstreams_arguments() -> None:
    parameters = list(inspect.signature(MegatronFSDP).parameters.values())
    assert [p.name for p in parameters[:3]] == ["module", "dist_index", "ddp_config"]
    rest = parameters[3:-1]
    assert {p.name: p.default for p in rest} == WRAPPER
    assert [p.name for p in rest] == list(WRAPPER)


def test_the_index_has_upstreams_fields() -> None:
    assert [field.name for field in dataclasses.fields(FSDPDistributedIndex)] == INDEX


@pytest.mark.parametrize("name", ["finish_grad_sync", "start_param_sync", "start_grad_sync"])
def test_an_argument_that_nobody_knows_is_not_swallowed(name: str) -> None:
    with pytest.raises(TypeError):
        inspect.signature(getattr(MegatronFSDP, name)).bind(None, nonsense=True)


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"data_parallel_sharding_strategy": "zero"}, ConfigurationError, "optim_grads"),
        (
            {"megatron_fsdp_grad_comm_dtype": torch.bfloat16},
            ConfigurationError,
            "mixed_precision_policy",
        ),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    config: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        MegatronFSDP(nn.Linear(2, 2), ddp_config=DistributedDataParallelConfig(**config))


def test_arguments_that_contradict_the_configuration_are_refused() -> None:
    config = DistributedDataParallelConfig()
    with pytest.raises(ConfigurationError, match="fsdp_double_buffer"):
        MegatronFSDP(nn.Linear(2, 2), ddp_config=config, fsdp_double_buffer=True)
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


def test_a_setting_about_speed_that_changes_nothing_says_so() -> None:
    for setting in ({"bucket_size": 1000}, {"fp8_param_gather": True}):
        ((name, value),) = setting.items()
        with pytest.warns(UserWarning, match=f"{name}={value} has no effect"):
            DistributedDataParallelConfig(**setting).arguments(MixedPrecisionPolicy())


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    ("strategy", "is_hybrid"),
    [(one, False) for one in STRATEGIES] + [(one, True) for one in STRATEGIES[1:]],
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
