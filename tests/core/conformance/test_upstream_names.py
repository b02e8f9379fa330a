"""Names, marks and arguments that callers of upstream know."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    Unit,
    batch,
    compare_gradients,
    name_of,
    pair,
    plain_backward,
)
from mfsdp_core.errors import LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_FP32 = torch.float32


def test_names_and_marks_say_what_upstreams_say() -> None:
    """On parameters, buffers, groups and the index."""
    for strategy in (0, 2, 3):
        model, plain = pair(strategy, calculate_per_token_loss=True)
        named = dict(plain.named_parameters())
        same("names", sorted(model.param_to_name.values()), sorted(named))
        same("all", (len(model.param_to_name), len(model.raw_param)), (len(named),) * 2)
        same("raw", sorted(model.raw_param), sorted(named))
        same("by id", len(model.sharded_by_original()), len(named))
        for full_name, p in model.named_parameters():
            whole = mfsdp_core.gather_full(p.detach())
            part = whole.flatten()[p.megatron_fsdp_slice]
            same("slice", part, p.detach().to_local().flatten())
            same("name", model.param_to_name[p], name_of(full_name))
            same("index", p.megatron_fsdp_dist_index is model.dist_index, True)
            facts = (p.orig_param.shape, p.orig_param.device.type, p.__fsdp_param__)
            same("orig_param", facts, (whole.shape, "meta", True))
        seen: list[str] = []

        def look(module: Any, _inputs: object, m: Any = model, s: Any = seen) -> None:
            raw = m.raw_param["units.1.up.weight"]
            same("raw while the unit runs", raw is module.up.weight, True)
            s.append(m.param_to_name[raw])

        model.module.units[1].register_forward_pre_hook(look)
        model(batch()).backward()
        same("looked", seen, ["units.1.up.weight"])
        plain_backward(plain, 0, times=dist.get_world_size())
        compare_gradients(model, plain)
        if strategy == 3:
            refuses(
                LifecycleError, "not gathered", lambda m=model: m.raw_param["units.0.up.weight"]
            )
        same("ranks", model.checkpoint_group.size(), dist.get_world_size())
        refuses(
            LifecycleError,
            "manual_buffer_registration() registers",
            model.param_and_grad_buffer.manual_buffer_registration,
        )
        same("no registration", model.buffer_registration, None)
    same("public names", set(mfsdp_core.__all__) == set(dir(mfsdp_core)), True)
    assert mfsdp_core.__version__[0].isdigit()
    refuses(AttributeError, "no attribute 'nothing'", lambda: mfsdp_core.nothing)


def test_the_wrapper_is_built_by_upstreams_arguments() -> None:
    """It does not sync itself, and shards everything by default."""
    _, plain = pair(0)
    model = mfsdp_core.MegatronFSDP(
        copy.deepcopy(plain),
        mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(None),
        fsdp_unit_modules=[Unit],
        enable_fine_grained_param_gather_backward_hook=True,
        check_for_nan_in_grad=True,
        fsdp_double_buffer=True,
    )
    said = model.ddp_config
    same("by default", said.data_parallel_sharding_strategy, "optim_grads_params")
    same("fine", said.megatron_fsdp_enable_fine_grained_param_gather, True)
    same("double", said.fsdp_double_buffer, True)
    with model.no_sync():
        model(batch(0)).backward()
    model(batch(1)).backward()
    assert all(p.grad is None for p in model.parameters()), "this wrapper does not sync itself"
    model.finish_grad_sync()
    plain_backward(plain, 0, 1)
    compare_gradients(model, plain)
    close("loss", model(batch()).detach(), plain(batch()).detach())


def test_what_was_left_out_is_told_by_the_model() -> None:
    fields = dataclasses.fields(mfsdp_core.DistributedDataParallelConfig)
    same(
        "on",
        {f.name for f in fields if f.default is True},
        {"gradient_reduce_div_fusion", "fsdp_all_gather_in_start_param_sync"},
    )
    config = mfsdp_core.DistributedDataParallelConfig()
    same("main weights", config.megatron_fsdp_main_params_dtype, _FP32)
    model, _ = pair(3)
    same("as it was asked for", model.ddp_config.overlap_grad_reduce, True)
    same("the mesh that was made", model.dist_index.device_mesh.size(), dist.get_world_size())
