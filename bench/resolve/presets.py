"""Named model shapes. Parameter counts are tested against the published ones."""

from __future__ import annotations

from bench.spec import HybridShape, ModelShape

_LLAMA3_VOCAB = 128_256
_LLAMA3_THETA = 500_000.0
_NEMOTRON3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


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
        # config.json of meta-llama/Llama-3.2-3B: 3,212,749,824 parameters.
        ModelShape(
            preset="3b",
            layers=28,
            hidden=3072,
            ffn_hidden=8192,
            heads=24,
            kv_heads=8,
            head_dim=128,
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


def _hybrids() -> tuple[ModelShape, ...]:
    return (
        # Small enough for two CPU ranks, with units of three sizes: 4,698,832 parameters.
        ModelShape(
            preset="hybrid-tiny",
            layers=len("MEM*EMEM*E"),
            hidden=192,
            ffn_hidden=512,
            heads=6,
            kv_heads=2,
            head_dim=32,
            vocab=256,
            tie_embeddings=True,
            hybrid=HybridShape(
                pattern="MEM*EMEM*E",
                mamba_heads=12,
                mamba_head_dim=32,
                mamba_groups=2,
                state=32,
                chunk=32,
                experts=8,
                experts_per_token=2,
                expert_hidden=224,
                shared_expert_hidden=448,
            ),
        ),
        # config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: 31,577,937,344 parameters (the
        # number that its safetensors files state). Its head is a matrix of its own.
        ModelShape(
            preset="nemotron3-nano-30b",
            layers=len(_NEMOTRON3_NANO),
            hidden=2688,
            ffn_hidden=1856,
            heads=32,
            kv_heads=2,
            head_dim=128,
            vocab=131_072,
            tie_embeddings=False,
            hybrid=HybridShape(
                pattern=_NEMOTRON3_NANO,
                mamba_heads=64,
                mamba_head_dim=64,
                mamba_groups=8,
                state=128,
                chunk=128,
                experts=128,
                experts_per_token=6,
                expert_hidden=1856,
                shared_expert_hidden=3712,
                routed_scale=2.5,
            ),
        ),
        # The same blocks at the size of one GPU: 15 of the 52, 16 of the 128 experts, a vocabulary
        # of 32,000 and a tied head. Not a published model: 1,481,913,664 parameters.
        ModelShape(
            preset="nemotron3-nano-1b",
            layers=len("MEMEM*EMEMEM*EM"),
            hidden=2688,
            ffn_hidden=1856,
            heads=32,
            kv_heads=2,
            head_dim=128,
            vocab=32_000,
            tie_embeddings=True,
            hybrid=HybridShape(
                pattern="MEMEM*EMEMEM*EM",
                mamba_heads=64,
                mamba_head_dim=64,
                mamba_groups=8,
                state=128,
                chunk=128,
                experts=16,
                experts_per_token=6,
                expert_hidden=1856,
                shared_expert_hidden=3712,
                routed_scale=2.5,
            ),
        ),
    )


PRESETS: dict[str, ModelShape] = {shape.preset: shape for shape in (*_shapes(), *_hybrids())}
