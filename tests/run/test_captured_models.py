"""The shipped models under CUDA graphs, as far as a CPU can tell: the host reads nothing in a step.

On torch's fake process group, where collectives leave memory as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.models.build import build_model
from bench.models.experts import Experts
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import Recompute, RunSpec
from mfsdp_core import CapturedStep, fully_shard_model, fully_shard_optimizer

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal")


class HostReads(TorchDispatchMode):
    """Operations whose result the host needs before it can go on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = args[1] if name in {"index", "index_put", "index_put_"} else ()
        if name in READS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_reads_of_the_host_are_seen() -> None:
    values = torch.tensor([1.0, -1.0])
    with HostReads() as reads:
        values[values > 0].add_(1)
        values.sum().item()
    assert reads.found == ["index", "_local_scalar_dense"]


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
def test_the_host_reads_nothing_in_a_step_with_experts_recompute_and_prediction(
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

    def tokens() -> torch.Tensor:
        return torch.randint(0, shape.vocab, (1, 8), generator=generator)

    for _ in range(4):
        step(tokens())
    with HostReads() as reads:
        step(tokens())
    assert reads.found == []


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
