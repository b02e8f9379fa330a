"""Named model shapes. Parameter counts are tested against the published ones."""

from __future__ import annotations

from bench.spec import ModelShape

_LLAMA3_VOCAB = 128_256
_LLAMA3_THETA = 500_000.0


def _shapes() -> tuple[ModelShape, ...]:
    return (
        # Small enough for a test: 1,049,728 parameters; the vocabulary is the 256 byte values.
        ModelShape(
            preset="debug",
            layers=4,
            hidden=128,
            ffn_hidden=512,
            heads=4,
            kv_heads=2,
            head_dim=32,
            vocab=256,
            tie_embeddings=False,
        ),
        # Small enough for two CPU ranks: 14,817,792 parameters.
        ModelShape(
            preset="tiny",
            layers=6,
            hidden=512,
            ffn_hidden=1152,
            heads=8,
            kv_heads=2,
            head_dim=64,
            vocab=256,
            tie_embeddings=False,
        ),
        # Of `make bench`: 34,087,424 parameters in units of 3.2 million, so that two or four CPU
        # ranks spend their step on arithmetic and on transfers rather than on starting either.
        ModelShape(
            preset="bench-34m",
            layers=8,
            hidden=512,
            ffn_hidden=1408,
            heads=8,
            kv_heads=8,
            head_dim=64,
            vocab=8192,
            tie_embeddings=False,
        ),
        # config.json of JackFram/llama-160m: 162,417,408 parameters.
        ModelShape(
            preset="160m",
            layers=12,
            hidden=768,
            ffn_hidden=3072,
            heads=12,
            kv_heads=12,
            head_dim=64,
            vocab=32_000,
            tie_embeddings=False,
            norm_eps=1e-6,
        ),
        # config.json of meta-llama/Llama-3.2-1B: 1,235,814,400 parameters.
        ModelShape(
            preset="1b",
            layers=16,
            hidden=2048,
            ffn_hidden=8192,
            heads=32,
            kv_heads=8,
            head_dim=64,
            vocab=_LLAMA3_VOCAB,
            tie_embeddings=True,
            rope_theta=_LLAMA3_THETA,
        ),
        # config.json of meta-llama/Meta-Llama-3-8B: 8,030,261,248 parameters.
        ModelShape(
            preset="llama3-8b",
            layers=32,
            hidden=4096,
            ffn_hidden=14_336,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocab=_LLAMA3_VOCAB,
            tie_embeddings=False,
            rope_theta=_LLAMA3_THETA,
        ),
        # config.json of meta-llama/Meta-Llama-3-70B: 70,553,706,496 parameters.
        ModelShape(
            preset="llama3-70b",
            layers=80,
            hidden=8192,
            ffn_hidden=28_672,
            heads=64,
            kv_heads=8,
            head_dim=128,
            vocab=_LLAMA3_VOCAB,
            tie_embeddings=False,
            rope_theta=_LLAMA3_THETA,
        ),
    )


PRESETS: dict[str, ModelShape] = {shape.preset: shape for shape in _shapes()}
