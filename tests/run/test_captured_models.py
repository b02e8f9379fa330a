"""The shipped models under CUDA graphs, as far as a CPU can tell: two recorded steps are alike.

On torch's fake process group, where collectives leave memory as it is.
"""

from __future__ import annotations

import pytest
import torch

from bench.models.build import build_model
from bench.models.experts import Experts
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import Recompute, RunSpec
from mfsdp_core import CapturedStep, fully_shard_model, fully_shard_optimizer


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({"preset": "debug"}, "full"),
        ({"preset": "debug"}, "selective"),
        ({"preset": "hybrid-tiny"}, "none"),
        ({"preset": "hybrid-tiny"}, "full"),
        ({"preset": "hybrid-tiny", "pattern": "M*E/*E/E"}, "full"),
    ],
    ids=str,
)
@pytest.mark.sample
def test_a_step_with_experts_recompute_and_prediction_can_be_replayed(
    model: dict[str, str], recompute: Recompute, dtype: torch.dtype
) -> None:
    spec = RunSpec.model_validate({"model": model, "launch": {"ranks": 4}})
    shape = resolve(spec, Machine(cpu_count=4, memory_bytes=2**40)).shape
    assert shape is not None
    module = build_model(shape, recompute=recompute, seed=0, device=torch.device("cpu"))
    sharded = fully_shard_model(
        module.to(dtype),
        fsdp_unit_modules=list(module.unit_classes),
        cuda_graph_mode=True,
        fsdp_double_buffer=True,
        transport="native",
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.1))

    def iteration(tokens: torch.Tensor) -> torch.Tensor:
        loss = sharded(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CapturedStep(sharded, optimizer, iteration)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step(torch.randint(0, shape.vocab, (1, 8), generator=generator))
    assert step.is_checked


@pytest.mark.parametrize("empty", [False, True])
def test_grouped_products_answer_as_one_product_per_expert(empty: bool) -> None:
    shape = resolve(
        RunSpec.model_validate({"model": {"preset": "hybrid-tiny"}}),
        Machine(cpu_count=4, memory_bytes=2**40),
    ).shape
    assert shape is not None
    assert shape.hybrid is not None
    generator = torch.Generator().manual_seed(3)
    experts = Experts(shape.hidden, shape.hybrid)
    for matrix in (experts.up, experts.down):
        matrix.data.normal_(std=0.1, generator=generator)
    counts = [0, 5, 0, 0, 3, 4, 0, 0] if empty else [1, 5, 2, 3, 3, 4, 2, 1]
    rows = torch.randn(sum(counts), shape.hidden, generator=generator, requires_grad=True)
    numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    wanted = experts._answer(rows, counts)
    found = experts._grouped(rows, numbers)
    torch.testing.assert_close(found, wanted)
    inputs = (rows, experts.up, experts.down)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
