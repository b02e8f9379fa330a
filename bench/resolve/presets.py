"""Named model shapes. Parameter counts are tested against the published ones."""

from __future__ import annotations

from typing import Any, Final

from bench.spec import HybridShape, ModelShape

_LLAMA3: Final = {"rope_theta": 500_000.0}
_NEMOTRON3_NANO: Final = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_1B: Final = "MEMEM*EMEMEM*EM"
_TINY: Final = "MEM*EMEM*E"

_NAMES: Final = (
    *("preset", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab"),
    "tie_embeddings",
)
#: By these names, and more.
_ROWS: Final[tuple[tuple[str, int, int, int, int, int, int, int, bool, dict[str, Any]], ...]] = (
    # Small enough for a test: 1,049,728 parameters; the vocabulary is the 256 byte values.
    ("debug", 4, 128, 512, 4, 2, 32, 256, False, {}),
    # Small enough for two CPU ranks: 14,817,792 parameters.
    ("tiny", 6, 512, 1152, 8, 2, 64, 256, False, {}),
    # Of `make bench`: 34,087,424 parameters in units of 3.2 million, so that two or four CPU
    # ranks spend their step on arithmetic and on transfers rather than on starting either.
    ("bench-34m", 8, 512, 1408, 8, 8, 64, 8192, False, {}),
    # config.json of JackFram/llama-160m: 162,417,408 parameters.
    ("160m", 12, 768, 3072, 12, 12, 64, 32_000, False, {"norm_eps": 1e-6}),
    # config.json of meta-llama/Llama-3.2-1B: 1,235,814,400 parameters.
    ("1b", 16, 2048, 8192, 32, 8, 64, 128_256, True, _LLAMA3),
    # config.json of meta-llama/Llama-3.2-3B: 3,212,749,824 parameters.
    ("3b", 28, 3072, 8192, 24, 8, 128, 128_256, True, _LLAMA3),
    # config.json of meta-llama/Meta-Llama-3-8B: 8,030,261,248 parameters.
    ("llama3-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, _LLAMA3),
    # config.json of meta-llama/Meta-Llama-3-70B: 70,553,706,496 parameters.
    ("llama3-70b", 80, 8192, 28_672, 64, 8, 128, 128_256, False, _LLAMA3),
    # Small enough for two CPU ranks, with units of three sizes: 4,698,832 parameters.
    ("hybrid-tiny", len(_TINY), 192, 512, 6, 2, 32, 256, True, {}),
    # config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: 31,577,937,344 parameters (the
    # number that its safetensors files state). Its head is a matrix of its own.
    ("nemotron3-nano-30b", len(_NEMOTRON3_NANO), 2688, 1856, 32, 2, 128, 131_072, False, {}),
    # The same blocks at the size of one GPU: 15 of the 52, 16 of the 128 experts, a vocabulary
    # of 32,000 and a tied head. Not a published model: 1,481,913,664 parameters.
    ("nemotron3-nano-1b", len(_NANO_1B), 2688, 1856, 32, 2, 128, 32_000, True, {}),
)

_NANO: Final[dict[str, Any]] = {
    "mamba_heads": 64,
    "mamba_head_dim": 64,
    "mamba_groups": 8,
    "state": 128,
    "chunk": 128,
    "experts_per_token": 6,
    "expert_hidden": 1856,
    "shared_expert_hidden": 3712,
    "routed_scale": 2.5,
}
_HYBRIDS: Final = {
    "hybrid-tiny": HybridShape(
        pattern=_TINY,
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
    "nemotron3-nano-30b": HybridShape(pattern=_NEMOTRON3_NANO, experts=128, **_NANO),
    "nemotron3-nano-1b": HybridShape(pattern=_NANO_1B, experts=16, **_NANO),
}


PRESETS: dict[str, ModelShape] = {
    row[0]: ModelShape.model_validate(
        {**dict(zip(_NAMES, row, strict=False)), **row[-1], "hybrid": _HYBRIDS.get(row[0])}
    )
    for row in _ROWS
}
