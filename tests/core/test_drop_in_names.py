"""The drop-in interface: names, order and defaults of upstream's functions, classes and fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp_core
from mfsdp_core import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import on_two_axes

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
    "offload": False,
}
FUNCTIONS = ("fully_shard_model", "fully_shard", "fully_shard_optimizer")


@pytest.fixture(scope="module")
def upstream() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each optional package that is missing
        return importlib.import_module("megatron_fsdp")


@pytest.mark.needs("megatron_fsdp")
@pytest.mark.parametrize("name", [*FUNCTIONS, "MixedPrecisionPolicy"])
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
def test_own_arguments_have_these_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(mfsdp_core, name)).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == OWN


@pytest.mark.needs("megatron_fsdp")
def test_the_wrapper_has_every_method_that_users_call(upstream: Any) -> None:
    public = {name for name in dir(upstream.MegatronFSDP) if not name.startswith("_")}
    # Called by upstream's own hooks alone; taken out (docs/frameworks.md).
    public -= {"all_gather_and_wait_parameters_ready", "get_distributed_index"}
    assert [name for name in public if not hasattr(MegatronFSDP, name)] == []


@pytest.mark.parametrize("name", ["finish_grad_sync", "start_param_sync", "start_grad_sync"])
def test_an_argument_that_nobody_knows_is_not_swallowed(name: str) -> None:
    with pytest.raises(TypeError):
        inspect.signature(getattr(MegatronFSDP, name)).bind(None, nonsense=True)
    with pytest.raises(TypeError, match=r"fully_shard_model\(\) got an unexpected .*'nonsense'"):
        fully_shard_model(torch.nn.Linear(1, 1), nonsense=True)


@pytest.mark.parametrize(
    ("old", "now"),
    [("preserve_fp32_weights", "main_params_d"), ("grad_reduce_in_fp32", "main_gra")],
)
def test_an_argument_that_upstream_had_once_is_refused_with_what_it_is_now(old, now):
    with pytest.raises(TypeError, match=rf"'{old}'. {old} is now MixedPrecisionPolicy\({now}"):
        fully_shard_model(torch.nn.Linear(1, 1), **{old: True})


def test_the_page_on_megatron_lms_adapter_passes_arguments_that_exist() -> None:
    page = Path(__file__).parents[2] / "docs" / "frameworks.md"
    call = page.read_text().split("\nfully_shard_model(\n")[1].split("\n)\n")[0]
    passed = set(re.findall(r"^    (\w+)=", call, re.MULTILINE))
    assert len(passed) > 20
    assert passed <= set(inspect.signature(fully_shard_model).parameters)


@pytest.mark.parametrize("name", ["DistributedDataParallelConfig", "FSDPDistributedIndex"])
def test_a_class_that_was_taken_out_says_what_serves_instead(name: str) -> None:
    with pytest.raises(AttributeError, match="pass its fields to fully_shard_model"):
        getattr(mfsdp_core, name)


@pytest.mark.on_ranks
@pytest.mark.parametrize("main_grads", [None, torch.float32])
@pytest.mark.parametrize("main_params", [None, torch.float64])
@pytest.mark.parametrize(
    ("strategy", "outer"),
    [
        ("optim", "no_shard"),
        ("optim_grads", "no_shard"),
        ("optim_grads_params", "no_shard"),
        ("optim_grads_params", "optim"),
    ],
)
def test_buffers_have_the_dtypes_of_the_policy_while_the_wire_changes(
    strategy: str,
    outer: str,
    main_params: torch.dtype | None,
    main_grads: torch.dtype | None,
) -> None:
    """The custom-dtype cases of pull request 3067, which read buffers by upstream's names."""
    toy = "conv_linear"
    with torch.device("meta"):
        module = build(toy)
    policy = MixedPrecisionPolicy(main_params, main_grads, None)
    model = fully_shard_model(
        module,
        **on_two_axes() | {"outer_dp_sharding_strategy": outer},
        fsdp_unit_modules=list(TOYS[toy].units),
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        init_model_with_meta_device=True,
        report_nan_in_param_grad=True,
    )
    assert dist.get_world_size(model.dist_index.get_fsdp_group()) == 2
    optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.001))
    dtype = main_params or torch.float32
    for grad_comm in (None, torch.float16):
        groups = model.param_and_grad_buffer.parameter_groups
        assert len(groups) == len(model.buckets())
        for group in groups:
            weights, gradients = group.main_weight_buffer, group.main_grad_buffer
            assert (weights is None) == (main_params is None)
            assert weights is None or weights.data.dtype == dtype
            assert gradients.data.dtype == torch.float32
            assert not gradients.data.numel()
        with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=grad_comm)):
            loss(model(batch(toy, dist.get_rank(), 0, torch.float32))).backward()
            for group in groups:
                assert group.main_grad_buffer.data.dtype == torch.float32
                assert group.main_grad_buffer.data.numel()
            optimizer.step()
            optimizer.zero_grad()
