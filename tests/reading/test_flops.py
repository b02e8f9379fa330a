"""The FLOP formula against published numbers and against its own algebra."""

from __future__ import annotations

import pytest

from bench.derive.flops import flops_per_global_batch
from bench.spec import ModelShape

LLAMA_8B = ModelShape(
    preset="llama3-8b",
    layers=32,
    hidden=4096,
    ffn_hidden=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    tie_embeddings=False,
)


def test_llama_8b_at_8192_tokens_and_128_sequences_is_5_397e16_flops():
    assert flops_per_global_batch(LLAMA_8B, 8192, 128) == pytest.approx(5.397e16, rel=1e-4)


@pytest.mark.parametrize(
    ("milliseconds", "tflops", "seq_len", "gpus"),
    [(10925.4, 617.5, 8192, 8), (10424.1, 647.2, 8192, 8), (2793.4, 268.8, 1024, 8)],
)
def test_published_pairs_of_milliseconds_and_tflops_are_reproduced(
    milliseconds, tflops, seq_len, gpus
):
    flops = flops_per_global_batch(LLAMA_8B, seq_len, 128)
    assert flops / (milliseconds / 1e3) / 1e12 / gpus == pytest.approx(tflops, rel=1e-3)


@pytest.mark.parametrize(("seq_len", "batch"), [(0, 1), (1, 0), (-5, 8)])
def test_an_empty_batch_is_refused(seq_len, batch):
    with pytest.raises(ValueError, match="at least 1"):
        flops_per_global_batch(LLAMA_8B, seq_len, batch)
