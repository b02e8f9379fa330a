"""The global batch of a step is the same however many ranks split it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.data.batches import Batches, token_batches

CPU = torch.device("cpu")
GLOBAL = 12


class Numbered:
    """Sample i is [i, i + 0.1 ...] in integers: i * 100 + position."""

    def sample(self, index: int) -> np.ndarray:
        return index * 100 + np.arange(5)


def first_tokens(step: int, ranks: int, micro_batch: int) -> list[int]:
    """Sample numbers of a step in rank order, then microbatch order."""
    found = []
    for rank in range(ranks):
        batches = Batches(
            token_batches(Numbered()),
            global_batch=GLOBAL,
            micro_batch=micro_batch,
            rank=rank,
            ranks=ranks,
            device=CPU,
        )
        for index in range(GLOBAL // ranks // micro_batch):
            tokens, _ = batches.microbatch(step, index)
            found += (tokens[:, 0] // 100).tolist()
    return found


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 12), (1, 2), (2, 3), (4, 1), (4, 3)])
@pytest.mark.parametrize("step", [0, 5])
def test_ranks_and_microbatches_share_out_the_global_batch_without_gap_or_overlap(
    step, ranks, micro_batch
):
    expected = list(range(step * GLOBAL, (step + 1) * GLOBAL))
    assert first_tokens(step, ranks, micro_batch) == expected


def test_targets_are_the_tokens_one_position_later():
    batches = Batches(
        token_batches(Numbered()), global_batch=2, micro_batch=2, rank=0, ranks=1, device=CPU
    )
    tokens, targets = batches.microbatch(0, 0)
    assert tokens.tolist() == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert targets.tolist() == [[1, 2, 3, 4], [101, 102, 103, 104]]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="global batch 12 is not ranks 5 x micro batch 1"):
        Batches(
            token_batches(Numbered()), global_batch=12, micro_batch=1, rank=0, ranks=5, device=CPU
        )
