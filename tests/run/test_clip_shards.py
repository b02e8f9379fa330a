"""The clipping of engines without their own: torch's result, and launches that do not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.engines.optimizer import clip_shards


def shards(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(5, 3, generator=generator).to(dtype) for _ in range(count)]
    return [*found, torch.empty(0, 3, dtype=dtype)]


@pytest.mark.parametrize("max_norm", [0.5, 1e3, float("inf")])
def test_it_clips_as_torch_does(max_norm: float) -> None:
    ours = shards(4)
    theirs = [torch.nn.Parameter(one.clone()) for one in ours]
    for one in theirs:
        one.grad = one.detach().clone()
    norm = clip_shards(ours, max_norm, ())
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.grad)


def test_dtypes_are_clipped_by_one_norm() -> None:
    mixed = [*shards(2), *shards(2, torch.bfloat16)]
    flat = torch.cat([one.double().flatten() for one in mixed])
    before = [one.clone() for one in mixed]
    norm = clip_shards(mixed, 1.0, ())
    assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-6)
    for one, other in zip(mixed, before, strict=True):
        factor = (1 / (norm + 1e-6)).to(one.dtype)
        assert torch.equal(one, other * factor)


def test_a_rank_without_elements_takes_part() -> None:
    assert clip_shards([], 1.0, (), torch.device("cpu")).item() == 0


class Launches(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_number_of_shards() -> None:
    counts = []
    for number in (2, 40):
        several = shards(number)
        with Launches() as launches:
            clip_shards(several, 0.5, ())
        counts.append(launches.count)
    assert counts[0] == counts[1]
