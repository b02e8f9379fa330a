"""Names of upstream beyond its functions: its wrapper's arguments and attributes, its dataclasses.

`test_oracle_signature.py` has the signatures of the functions.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

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


def test_the_constructor_has_upstreams_arguments() -> None:
    parameters = list(inspect.signature(MegatronFSDP).parameters.values())
    assert [p.name for p in parameters[:3]] == ["module", "dist_index", "ddp_config"]
    rest = parameters[3:-1]
    assert {p.name: p.default for p in rest} == WRAPPER
    assert [p.name for p in rest] == list(WRAPPER)


def test_own_arguments_have_the_defaults_of_the_function() -> None:
    parameters = inspect.signature(fully_shard_model).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == OWN_DEFAULTS


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
