"""Names, marks and arguments that callers of upstream know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp_core
from conformance.judging import refuses, same
from conformance.small_model import batch, compare_gradients, name_of, pair, plain_backward
from mfsdp_core.errors import LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_FP32 = torch.float32


def test_names_and_marks_say_what_upstreams_say() -> None:
    """On parameters, buffers, groups and the index."""
    for strategy in (0, 2, 3):
        model, plain = pair(strategy, calculate_per_token_loss=True)
        named = dict(plain.named_parameters())
        same("names", sorted(set(model.param_to_name.values())), sorted(named))
        same("of both faces", len(model.param_to_name), 2 * len(named))
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
            s.append(m.param_to_name[module.up.weight])

        model.module.units[1].register_forward_pre_hook(look)
        model(batch()).backward()
        same("looked", seen, ["units.1.up.weight"])
        plain_backward(plain, 0, times=dist.get_world_size())
        compare_gradients(model, plain)
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
