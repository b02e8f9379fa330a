"""The ending of a refusal: what the user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from bench.removed import removed

_WORDS_ELSEWHERE: dict[str, str] = {
    # engines
    "fsdp2 mfsdp": "fsdp fully_shard",
    "mfsdp": "megatron",
    "single": "none",
    "single ddp fsdp2": "torch",
    "ddp": "distributed_data_parallel",
    # strategies
    "no_shard": "zero0 zero_0",
    "optim": "zero1 zero_1",
    "optim_grads": "zero2 zero_2 shard_grad_op",
    "optim_grads_params": "zero3 zero_3 full_shard",
    "optim optim_grads optim_grads_params": "zero",
    "engine.strategy": "sharding sharding_strategy zero_stage",
    "engine.outer_size engine.outer_strategy": "hsdp",
    # dtypes
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp32": "float32 float",
    "fp64": "float64 double",
    "dtypes.compute": "dtype precision param_dtype",
    "dtypes.grad_comm": "reduce_dtype",
    # training
    "train.lr": "learning_rate",
    "train.global_batch train.micro_batch": (
        "batch_size batch bs gradient_accumulation gradient_accumulation_steps grad_accum"
    ),
    "train.micro_batch": "mbs",
    "train.global_batch": "gbs",
    "train.seq_len": "sequence_length context_length max_seq_len",
    "train.steps": "iterations iters max_steps epochs",
    "train.weight_decay": "wd",
    "train.clip_norm": "grad_clip clip_grad max_grad_norm",
    "train.warmup_steps": "warmup",
    "train.beta1 train.beta2": "betas",
    "adamw": "adam",
    "data.kind data.path": "dataset",
    # model
    "model.hidden": "hidden_size dim d_model",
    "model.ffn_hidden": "intermediate_size",
    "model.layers": "num_layers n_layers num_hidden_layers",
    "model.heads": "num_attention_heads n_heads",
    "model.vocab": "vocab_size",
    "model.recompute": "activation_checkpointing checkpointing",
    # processes
    "launch.ranks": "world_size nproc nproc_per_node num_gpus processes",
    "launch.ranks launch.device": "gpus",
    "cuda": "gpu",
    "launch.timeout_seconds": "timeout",
    # a sweep file
    "matrix": "grid axes",
    "base": "defaults config",
    "repeat": "runs",
}
"""What it is called here, one name or several, and the words of other tools and papers for it."""

_NAMES_HERE: dict[str, list[str]] = {
    word: here.split() for here, words in _WORDS_ELSEWHERE.items() for word in words.split()
}


def did_you_mean(word: str, known: Iterable[str], ending: str = "") -> str:
    """`; did you mean 'x' or 'y'?`, or an empty string.

    What serves in place of a word that was removed, the same word in another section, the same
    thing under another name, or the nearest spelling. ending: of every name, where `word` has none.
    """
    if gone := removed(word):
        return gone
    choices = list(known)
    near = _same_leaf(word, choices) or _same_meaning(word, choices)
    near = (
        near
        or sorted(
            # Of words that are as close, the one that begins alike: fsdp2, not mfsdp, for fsdp3.
            difflib.get_close_matches(word, choices, cutoff=0.6),
            key=lambda near: (
                -round(difflib.SequenceMatcher(None, near, word).ratio(), 2),
                near[:1] != word[:1],
            ),
        )[:1]
    )
    return f"; did you mean {' or '.join(repr(name + ending) for name in near)}?" if near else ""


def _leaf(word: str) -> str:
    return word.rpartition(".")[2]


def _same_leaf(word: str, known: Collection[str]) -> list[str]:
    return [name for name in known if name != word and _leaf(name) == _leaf(word)]


def _same_meaning(word: str, known: Collection[str]) -> list[str]:
    plain = _leaf(word).strip().lower().replace("-", "_")
    return [name for name in _NAMES_HERE.get(plain, ()) if name in known]
