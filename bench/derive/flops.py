"""Model FLOPs of one training step of a Llama-style network, by one named formula.

The formula is the one that Megatron-LM prints its throughput with since core_v0.12 (causal
attention halved, 2025-03). TFLOP/s of other versions and frameworks differ for the same speed: by
a factor of 1.125 for an 8B model at a sequence of 8192 where attention is counted as non-causal.
That is why records keep milliseconds and tokens, and TFLOP/s is derived here on every read.
"""

from __future__ import annotations

from bench.spec import ModelShape

FORMULA = "megatron-causal-2025-03"

# Forward, gradient of the input, gradient of the weight: three passes of two FLOPs per weight.
_FLOPS_PER_WEIGHT_AND_TOKEN = 3 * 2


def flops_per_global_batch(shape: ModelShape, seq_len: int, global_batch: int) -> float:
    """FLOPs of one optimizer step over `global_batch` sequences of `seq_len` tokens.

    F = B s [6 h 3f L + 6 (h (q + 2 kv) + q h) L + 6 h V] + B s^2 6 q L, with q = heads * head_dim
    and kv = kv_heads * head_dim. Counted: matrix products of the MLP (gated), of the attention
    projections, of the logits, and causal attention (half of the square). Not counted: the
    embedding lookup, norms, softmax, the optimizer, and what activation recompute repeats (these
    are model FLOPs, not hardware FLOPs). V is the vocabulary as the model has it, padding included.

    Args:
        shape: the architecture, counts in elements.
        seq_len: tokens per sequence, at least 1.
        global_batch: sequences per optimizer step over all ranks, at least 1.

    Returns:
        FLOPs (not TFLOPs), as a float because the values pass 2^53.

    Raises:
        ValueError: `seq_len` or `global_batch` below 1.
    """
    if seq_len < 1 or global_batch < 1:
        raise ValueError(
            f"seq_len and global_batch must be at least 1, found {seq_len} and {global_batch}"
        )
    query = shape.heads * shape.head_dim
    key_or_value = shape.kv_heads * shape.head_dim
    mlp = shape.hidden * 3 * shape.ffn_hidden * shape.layers
    projections = (shape.hidden * (query + 2 * key_or_value) + query * shape.hidden) * shape.layers
    logits = shape.hidden * shape.vocab
    weights = float(mlp + projections + logits)
    tokens = float(global_batch) * seq_len
    attention = tokens * seq_len * 6.0 * query * shape.layers
    return tokens * _FLOPS_PER_WEIGHT_AND_TOKEN * weights + attention
