"""torch.compile of units and whole models: the same gradients, and nothing held or sent twice."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.beside_torch import near
from oracle.models import Block, Chain, loss
from oracle.ranks import mesh
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


def compiled(how: str, backend: str, strategy: str) -> tuple[Any, Any]:
    """A sharded model and what to call. how: units in place, wrapped units, or the whole."""
    torch.manual_seed(9)
    module = Chain(outputs=3).double()
    if how == "in place":
        for block in module.blocks:
            block.compile(backend=backend)
    elif how == "wrapped":
        module.blocks = nn.ModuleList(torch.compile(b, backend=backend) for b in module.blocks)
    model = fully_shard_model(
        module,
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    return model, torch.compile(model, backend=backend) if how == "whole" else model


def compare(how: str, backend: str, strategy: str) -> list[int]:
    """Three cycles beside plain torch; collectives of each."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, call = compiled(how, backend, strategy)
    torch.manual_seed(9)
    reference = Chain(outputs=3).double()
    rank, sent = mesh(2).get_local_rank("dp"), [0]
    at_rest = model.ledger.bytes_by_category()
    for cycle in range(3):
        generator = torch.Generator().manual_seed(cycle)
        x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)
        for part in x:
            (loss(reference(part)) / 2).backward()
        loss(call(x[rank])).backward()
        sent.append(len(model.wire_log))
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            near(f"a gradient of cycle {cycle}", gather_full(found.grad), wanted.grad)
        model.zero_grad_buffer()
        reference.zero_grad()
    same("bytes at rest", model.ledger.bytes_by_category(), at_rest)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == (how != "not"), graphs
    return [after - before for before, after in itertools.pairwise(sent)]


@pytest.mark.parametrize(
    ("how", "backend", "strategy"),
    [
        pytest.param("in place", "aot_eager", "optim_grads_params"),
        *(
            pytest.param(how, backend, strategy, marks=pytest.mark.nightly)
            for how in ("in place", "wrapped", "whole")
            for backend in ("aot_eager", "inductor")
            for strategy in STRATEGIES
            if (how, backend, strategy) != ("in place", "aot_eager", "optim_grads_params")
        ),
    ],
)
def test_a_compiled_model_computes_sends_and_holds_what_a_plain_one_does(
    how: str, backend: str, strategy: str
) -> None:
    """Dynamo reads `.grad` of every input of a frame, and a unit's input is no leaf: it warns.

    Inductor, imported by its first use, defines modules by a deprecated name of torch's own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        assert compare(how, backend, strategy) == compare("not", backend, strategy)
