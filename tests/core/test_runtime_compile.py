"""torch.compile of units and whole models: the same gradients, and nothing held or sent twice."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import Block, Chain, loss
from oracle.ranks import RankPool, mesh
from oracle.reference import relative_difference
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes


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


def compare(how: str, backend: str, strategy: str) -> tuple[float, list[int], bool, int]:
    """Largest gradient error of three cycles, collectives of each, whether what is held at rest
    stays the same, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, call = compiled(how, backend, strategy)
    torch.manual_seed(9)
    reference = Chain(outputs=3).double()
    rank, worst, sent = mesh(2).get_local_rank("dp"), 0.0, [0]
    at_rest = model.ledger.bytes_by_category()
    for cycle in range(3):
        generator = torch.Generator().manual_seed(cycle)
        x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)
        for part in x:
            (loss(reference(part)) / 2).backward()
        loss(call(x[rank])).backward()
        sent.append(len(model.wire_log))
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            error = relative_difference({"": gather_full(found.grad)}, {"": wanted.grad})
            worst = max(worst, error)
        model.zero_grad_buffer()
        reference.zero_grad()
    held = model.ledger.bytes_by_category() == at_rest
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return (
        worst,
        [after - before for before, after in itertools.pairwise(sent)],
        held,
        graphs,
    )


def quietly_compare(how: str, backend: str, strategy: str) -> tuple[float, list[int], bool, int]:
    """Dynamo reads `.grad` of every input of a frame, and a unit's input is no leaf: it warns.

    Inductor, imported by its first use, defines modules by a deprecated name of torch's own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        return compare(how, backend, strategy)


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
    ranks: RankPool, how: str, backend: str, strategy: str
) -> None:
    plain = ranks.run(quietly_compare, "not", backend, strategy)
    found = ranks.run(quietly_compare, how, backend, strategy, seconds=200)
    for (error, sent, held, graphs), (_, expected, _, none) in zip(found, plain, strict=True):
        assert error < 1e-12
        assert sent == expected
        assert held
        assert graphs > 0
        assert none == 0
