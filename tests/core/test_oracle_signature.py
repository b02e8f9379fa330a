"""The drop-in interface: names, order, defaults, and refusal of what is not built yet."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import warnings
from typing import Any

import pytest
import torch

import mfsdp_core
from mfsdp_core import MixedPrecisionPolicy

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
    function = getattr(mfsdp_core, name)
    expected = [*POSITIONAL[name], *SHARED_DEFAULTS]
    assert list(inspect.signature(function).parameters)[: len(expected)] == expected
    found = defaults_of(function)
    assert {key: found[key] for key in SHARED_DEFAULTS} == SHARED_DEFAULTS


@pytest.mark.parametrize("name", ["fully_shard_model", "fully_shard"])
def test_arguments_beyond_upstreams_are_keyword_only(name: str) -> None:
    parameters = inspect.signature(getattr(mfsdp_core, name)).parameters
    ours = set(parameters) - set(SHARED_DEFAULTS) - set(POSITIONAL[name])
    assert all(parameters[p].kind is inspect.Parameter.KEYWORD_ONLY for p in ours)


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


@pytest.mark.parametrize("method", WRAPPER_METHODS)
def test_the_wrapper_has_every_method_that_users_call(method: str) -> None:
    assert callable(getattr(mfsdp_core.MegatronFSDP, method))


DATACLASSES = ("MixedPrecisionPolicy", "DistributedDataParallelConfig", "FSDPDistributedIndex")


@pytest.mark.parametrize("name", [*POSITIONAL, *DATACLASSES, "MegatronFSDP"])
def test_signatures_equal_those_of_the_installed_package(name: str) -> None:
    theirs = inspect.signature(getattr(upstream(), name)).parameters
    ours = inspect.signature(getattr(mfsdp_core, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
