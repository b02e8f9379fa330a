"""Model FLOPs of one training step, by one named formula per model family.

That of Llama-style networks is the one that Megatron-LM prints its throughput with since core_v0.12
(causal attention halved, 2025-03). TFLOP/s of other versions and frameworks differ for the same
speed: by a factor of 1.125 for an 8B model at a sequence of 8192 where attention is counted as
non-causal. That is why records keep milliseconds and tokens, and TFLOP/s is derived here on every
read.
"""

from __future__ import annotations

from bench.spec import PREDICTION, ModelShape, ResolvedRun

FORMULA = "megatron-causal-2025-03"
HYBRID_FORMULA = "hybrid-causal-scan7"

# Forward, gradient of the input, gradient of the weight: three passes of two FLOPs per weight.
_FLOPS_PER_WEIGHT_AND_TOKEN = 3 * 2


def flops_per_global_batch(shape: ModelShape, seq_len: int, global_batch: int) -> float:
    """FLOPs of one optimizer step over `global_batch` sequences of `seq_len` tokens.

    F = B s [6 h 3f L + 6 (h (q + 2 kv) + q h) L + 6 h V] + B s^2 6 q L, with q = heads * head_dim
    and kv = kv_heads * head_dim. Counted: matrix products of the MLP (gated), of the attention
    projections, of the logits, and causal attention (half of the square). Not counted: the
    embedding lookup, norms, softmax, the optimizer, and what activation recompute repeats (these
    are model FLOPs, not hardware FLOPs). V is the vocabulary as the model has it, padding included.

    Hybrids, formula `hybrid-causal-scan7`, as Megatron-LM's `hybrid_flops` (core_v0.16) counts
    them, per token and block, times the same three passes: attention as above; a Mamba block with
    n heads and inner width d = n * head_dim, g groups and state size m takes 2 h (2 d + 2 g m + n)
    and 2 d h for its projections and 7 d m for the scan, taken token by token (what a chunked scan
    computes beyond that is not model work); experts 4 h (k e + shared width) for the k that a token
    visits of width e; a feed-forward 4 h f. Not counted besides the above: the short convolution
    and the router. A depth of multi-token prediction adds its blocks, its projection 4 h h and the
    logits again. Megatron takes d = 2 h whatever the heads are; here d is what the model has, and
    both agree where heads * head_dim = 2 h.

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
    depths = 0 if shape.hybrid is None else shape.hybrid.pattern.count(PREDICTION)
    logits = shape.hidden * shape.vocab * (1 + depths)
    tokens = float(global_batch) * seq_len
    attentions = shape.layers if shape.hybrid is None else shape.hybrid.pattern.count("*")
    attention = tokens * seq_len * 6.0 * query * attentions
    weights = _multiplying_weights(shape) + shape.attention_weights * attentions + logits
    flops = tokens * _FLOPS_PER_WEIGHT_AND_TOKEN * weights + attention
    return flops + tokens * _scan_flops_per_token(shape)


def formula(shape: ModelShape) -> str:
    """Name of the formula that `flops_per_global_batch` uses for `shape`."""
    return FORMULA if shape.hybrid is None else HYBRID_FORMULA


def _multiplying_weights(shape: ModelShape) -> float:
    """Weights that a token is multiplied with, besides those of attention and head."""
    hybrid = shape.hybrid
    if hybrid is None:
        return float(shape.hidden * 3 * shape.ffn_hidden * shape.layers)
    inner, kinds = hybrid.mamba_inner, hybrid.pattern
    visited = hybrid.experts_per_token * hybrid.expert_hidden + hybrid.shared_expert_hidden
    into_mamba = inner + hybrid.mamba_convolved + hybrid.mamba_heads
    per_hidden = (
        kinds.count("M") * (into_mamba + inner)
        + kinds.count("E") * 2 * visited
        + kinds.count("-") * 2 * shape.ffn_hidden
        + kinds.count(PREDICTION) * 2 * shape.hidden
    )
    return float(shape.hidden * per_hidden)


def _scan_flops_per_token(shape: ModelShape) -> float:
    """Forward and backward of the recurrences: 3 * 7 per inner channel and state."""
    hybrid = shape.hybrid
    if hybrid is None:
        return 0.0
    return 3.0 * 7.0 * hybrid.pattern.count("M") * hybrid.mamba_inner * hybrid.state


def recomputed_flops(resolved: ResolvedRun) -> float:
    """Matrix products that one rank computes a second time in a step.

    A third of the model's FLOPs are the forward pass; recomputed are those of the layers (full),
    or of the attention's products alone (selective); and the head's, where the loss is in chunks.
    """
    shape, train = resolved.shape, resolved.train
    if shape is None:
        return 0.0
    rows = train.micro_batch * resolved.microbatches
    of_batch = flops_per_global_batch(shape, train.seq_len, rows)
    tokens = float(rows * train.seq_len)
    head = 2.0 * tokens * shape.hidden * shape.vocab
    again = head if resolved.loss_chunks > 1 else 0.0
    if resolved.recompute == "none":
        return again
    if resolved.recompute == "full":
        return again + (of_batch - 3 * head) / 3
    layers = shape.layers if shape.hybrid is None else shape.hybrid.pattern.count("*")
    return again + 2.0 * tokens * train.seq_len * shape.heads * shape.head_dim * layers
