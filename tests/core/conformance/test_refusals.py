"""Arguments that cannot mean anything are refused in words, before anything is changed or sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mfsdp_core
from conformance.judging import refuses, same
from conformance.small_model import Small, Unit, batch, pair
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    ConfigurationError,
    GradAlreadyReducedError,
    UnitSelectionError,
)
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import Payload
from oracle.toy_codecs import ScaledBytes

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_POLICY = mfsdp_core.MixedPrecisionPolicy
_GRAPHS = {"cuda_graph_mode": True, "fsdp_double_buffer": True, "transport": "native"}


class _ForwardAlone(ScaledBytes):
    """Nothing travels for a backward pass."""

    def payloads(self, layout: Layout, compute: str) -> tuple[Payload, ...]:
        one_way = frozenset({"forward"})
        return tuple(replace(one, directions=one_way) for one in super().payloads(layout, compute))


#: Error, words, arguments.
_ARGUMENTS: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
    (ConfigurationError, "mixed_precision_policy", {"mixed_precision_policy": torch.float32}),
    (
        ConfigurationError,
        "no payload that a backward pass gathers",
        {"mixed_precision_policy": _POLICY(torch.float32, weight_codec=_ForwardAlone())},
    ),
    (ConfigurationError, "on_double_reduction='x'", {"on_double_reduction": "x"}),
    (ConfigurationError, "nested_units='x'", {"nested_units": "x"}),
    (ConfigurationError, "transport='x'", {"transport": "x"}),
    (ConfigurationError, "unused_parameters='x'", {"unused_parameters": "x"}),
    (ConfigurationError, "zero_dp_strategy=4", {"zero_dp_strategy": 4}),
    *(
        (ConfigurationError, "2 or 'optim_grads'", {"zero_dp_strategy": wrong})
        for wrong in (True, -1, 1.0, None, "zero3")
    ),
    (ConfigurationError, "there is none", {"outer_dp_sharding_strategy": 1}),
    *(
        (
            ConfigurationError,
            "overlap_grad_reduce=False",
            {"overlap_grad_reduce": False, "zero_dp_strategy": sharded},
        )
        for sharded in (2, 3)
    ),
    (
        ConfigurationError,
        "counts whole units",
        {"enable_fine_grained_param_gather": True, "prefetch_budget_bytes": 1},
    ),
    (ConfigurationError, "prefetch_order='x'", {"prefetch_order": "x"}),
    (ConfigurationError, "must name every unit once", {"prefetch_order": ["units.0"]}),
    (ConfigurationError, "allocator='x'", {"allocator": "x"}),
    (ConfigurationError, "nccl_ub registers", {"nccl_ub": True, "transport": "point_to_point"}),
    (ConfigurationError, "name dimensions of device_mesh", {"tp_dim": "t"}),
    (ConfigurationError, "dp_outer_dim", {"dp_outer_dim": "o", "dp_shard_dim": "i"}),
    (UnitSelectionError, "of which the model has none", {"fsdp_unit_modules": [nn.Conv1d]}),
    (UnitSelectionError, "cannot import", {"fsdp_unit_modules": ["torch.nn.Nothing"]}),
    (UnitSelectionError, "cannot import", {"fsdp_unit_modules": "Nothing"}),
    (UnitSelectionError, "module classes or", {"fsdp_unit_modules": [int]}),
    (UnitSelectionError, "module classes or", {"fsdp_unit_modules": [3]}),
    (ConfigurationError, "gives buffers back", {"cuda_graph_mode": True}),
    (ConfigurationError, "on the host", _GRAPHS | {"report_nan_in_param_grad": True}),
    (ConfigurationError, "on the host", _GRAPHS | {"check_for_nan_in_grad": True}),
    (ConfigurationError, "from the host", _GRAPHS | {"transport": "point_to_point"}),
    (
        ConfigurationError,
        "never captured",
        _GRAPHS
        | {"mixed_precision_policy": _POLICY(weight_codec=mfsdp_core.Float8Reference("current"))},
    ),
)


def test_arguments_are_refused() -> None:
    """Each alone, of a model that is left as it was."""
    module = Small()
    weights = dict(module.named_parameters())
    for error, words, arguments in _ARGUMENTS:
        said = {"fsdp_unit_modules": [Unit], **arguments}
        refuses(error, words, mfsdp_core.fully_shard_model, module, **said)
        refuses(
            error,
            words,
            lambda s=said: mfsdp_core.fully_shard(
                module, torch.optim.SGD(module.parameters(), lr=0.1), **s
            ),
        )
        same("untouched", dict(module.named_parameters()).keys(), weights.keys())
        assert all(dict(module.named_parameters())[n] is p for n, p in weights.items()), words
    model, _ = pair(3)
    bad = mfsdp_core.fully_shard_model
    for one in (model, model.module, model.module.units[0]):
        refuses(ConfigurationError, "are sharded already", bad, one)
    first, second = Small(), Small()
    second.units[1].up.weight = first.units[1].up.weight
    bad(first, fsdp_unit_modules=[Unit])
    refuses(ConfigurationError, "also in a module that is sharded already", bad, second)
    for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
        refuses(ConfigurationError, name, _POLICY, **{name: "float32"})
        refuses(ConfigurationError, name, _POLICY, **{name: torch.int32})
    refuses(ConfigurationError, "recipe", lambda: mfsdp_core.Float8Reference("int1"))


def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    """DTensors without a dimension for them, interleaved parts, odd placements."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    shard = mfsdp_core.fully_shard_model
    where = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}

    def cut(placement: Any, of: Any = None) -> nn.Module:
        module = nn.Linear(4, 6, bias=False)
        whole = distribute_tensor(module.weight.detach(), of or mesh["tp"], [placement])
        module.weight = nn.Parameter(whole)
        return module

    refuses(ConfigurationError, "is a DTensor already", lambda: shard(cut(Shard(0))))
    refuses(
        ConfigurationError,
        "on the tp_dim axis alone",
        lambda: shard(cut(Shard(0), mesh["dp"]), **where),
    )

    def marked(**marks: Any) -> nn.Module:
        module = nn.Linear(4, 6, bias=False)
        for name, value in marks.items():
            setattr(module.weight, name, value)
        return module

    stride = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2}
    refuses(CapabilityNotBuiltError, "partition_stride=2", lambda: shard(marked(**stride), **where))
    for marks, wanted in (
        ({}, (6, 4)),
        ({"_tensor_parallel_mode": "column"}, (6 * ranks, 4)),
        ({"_tensor_parallel_mode": "row"}, (6, 4 * ranks)),
        ({"tensor_model_parallel": True, "partition_dim": 1}, (6, 4 * ranks)),
        ({"tensor_model_parallel": True, "partition_dim": 0}, (6 * ranks, 4)),
        ({"tensor_model_parallel": True, "partition_dim": -1}, (6, 4)),
        ({"partition_dim": 0}, (6, 4)),
        (stride | {"partition_stride": 1}, (6 * ranks, 4)),
    ):
        model = shard(marked(**marks), **where)
        (parameter,) = model.parameters()
        same(f"{marks}", tuple(parameter.shape), wanted)
        offsets = parameter._mfsdp_offsets
        first = dist.get_rank() * 6 if wanted[0] > 6 else 0
        second = dist.get_rank() * 4 if wanted[1] > 4 else 0
        same("where it begins", offsets, (first, second))


def test_a_second_reduction_is_refused_or_told() -> None:
    """Where whole gradients have been reduced, another pass would reduce them twice."""
    import warnings

    why = "optim_grads and optim_grads_params add up"
    for strategy in (0, 1):
        model, _ = pair(strategy)
        model(batch(0)).backward()
        refuses(GradAlreadyReducedError, why, lambda m=model: m(batch(1)).backward())
        for p in model.module.units.parameters():  # clears some gradients, not all
            p.grad = None
        refuses(GradAlreadyReducedError, "already reduced", lambda m=model: m(batch(1)).backward())
        model.zero_grad()
        model(batch(1)).backward()
        lenient, _ = pair(strategy, on_double_reduction="warn")
        lenient(batch(0)).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            lenient(batch(1)).backward()
        assert any("already reduced" in str(w.message) for w in said), "nothing was said"
