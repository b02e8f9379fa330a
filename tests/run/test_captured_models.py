"""What lets experts into a CUDA graph: products of all of them at once, without their counts."""

from __future__ import annotations

import pytest
import torch

from bench.models.experts import Experts
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import RunSpec


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
