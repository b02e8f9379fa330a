"""What ranks of `validate` send, and how they count the tensors that exist."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from bench.engines.inspection import LocalRows
from bench.testing.worker import packed, unpacked
from bench.validate.observation import Seen
from bench.validate.scenario import live_bytes, set_aside

TENSORS = {
    "double": torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]], dtype=torch.float64),
    "half": torch.tensor([1.0, -3.0], dtype=torch.bfloat16),
    "transposed": torch.arange(6).view(2, 3).T,
    "part": torch.arange(10.0)[3:7],
    "scalar": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
    "sparse": torch.eye(3).to_sparse(),
}


def bits(tensor: Tensor) -> list[int]:
    return tensor.to_dense().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was_sent(name: str) -> None:
    sent = TENSORS[name]
    found = unpacked(packed(Seen(1, whole={"w": sent}, initial={"p": LocalRows(sent, 1, 2)})))
    for tensor in (found.whole["w"], found.initial["p"].rows):
        assert (tensor.dtype, tensor.shape, tensor.layout) == (sent.dtype, sent.shape, sent.layout)
        assert bits(tensor) == bits(sent)
    assert (found.rank, found.initial["p"].order, found.initial["p"].parts) == (1, 1, 2)


def test_what_arrives_can_be_written_and_is_not_the_senders_memory() -> None:
    sent = torch.ones(3)
    found = unpacked(packed(sent))
    found.add_(1)
    assert sent.tolist() == [1.0, 1.0, 1.0]


def test_only_tensors_made_after_the_rest_was_set_aside_are_counted() -> None:
    old = torch.ones(100_000)
    try:
        set_aside()
        before = live_bytes()
        new = torch.ones(1_000)
        assert before < old.nbytes
        assert live_bytes() - before == new.nbytes
        assert live_bytes([new]) == before
    finally:
        gc.unfreeze()
