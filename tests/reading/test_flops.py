"""The FLOP formula against published numbers and against its own algebra."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


shapes = st.builds(
    lambda layers, heads, head_dim, ffn, vocab: ModelShape(
        preset="any",
        layers=layers,
        hidden=heads * head_dim,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocab=vocab,
        tie_embeddings=False,
    ),
    st.integers(1, 100),
    st.integers(1, 64),
    st.sampled_from([8, 64, 128]),
    st.integers(1, 30_000),
    st.integers(2, 200_000),
)


@given(shapes, st.integers(1, 10_000), st.integers(1, 1000))
def test_flops_are_proportional_to_the_batch(shape, seq_len, batch):
    one = flops_per_global_batch(shape, seq_len, 1)
    assert flops_per_global_batch(shape, seq_len, batch) == pytest.approx(one * batch, rel=1e-12)


@given(shapes, st.integers(1, 10_000))
def test_only_attention_grows_with_the_square_of_the_sequence(shape, seq_len):
    linear_only = 2 * flops_per_global_batch(shape, seq_len, 1)
    excess = flops_per_global_batch(shape, 2 * seq_len, 1) - linear_only
    causal_attention = 6 * shape.heads * shape.head_dim * shape.layers
    assert excess == pytest.approx(2 * seq_len**2 * causal_attention, rel=1e-6)


@given(shapes)
def test_short_sequences_cost_six_flops_per_weight_that_multiplies(shape):
    norms = shape.hidden * (2 * shape.layers + 1)
    lookup = shape.vocab * shape.hidden
    multiplying = shape.parameters - norms - lookup
    attention = 6 * shape.heads * shape.head_dim * shape.layers
    assert flops_per_global_batch(shape, 1, 1) == pytest.approx(6 * multiplying + attention)


@pytest.mark.parametrize(("seq_len", "batch"), [(0, 1), (1, 0), (-5, 8)])
def test_an_empty_batch_is_refused(seq_len, batch):
    with pytest.raises(ValueError, match="at least 1"):
        flops_per_global_batch(LLAMA_8B, seq_len, batch)
