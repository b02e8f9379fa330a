"""The ending of a refusal: what the user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_WORDS_ELSEWHERE: dict[str, tuple[str, ...]] = {
    # engines
    "fsdp": ("fsdp2", "mfsdp"),
    "fully_shard": ("fsdp2", "mfsdp"),
    "megatron": ("mfsdp",),
    "none": ("single",),
    "torch": ("single", "ddp", "fsdp2"),
    "distributed_data_parallel": ("ddp",),
    "deepspeed": ("mfsdp", "fsdp2"),
    # strategies
    "zero0": ("no_shard",),
    "zero1": ("optim",),
    "zero2": ("optim_grads",),
    "zero3": ("optim_grads_params",),
    "zero_0": ("no_shard",),
    "zero_1": ("optim",),
    "zero_2": ("optim_grads",),
    "zero_3": ("optim_grads_params",),
    "zero": ("optim", "optim_grads", "optim_grads_params"),
    "full_shard": ("optim_grads_params",),
    "shard_grad_op": ("optim_grads",),
    "sharding": ("engine.strategy",),
    "sharding_strategy": ("engine.strategy",),
    "zero_stage": ("engine.strategy",),
    "hsdp": ("engine.outer_size", "engine.outer_strategy"),
    # dtypes
    "bfloat16": ("bf16",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "float32": ("fp32",),
    "float": ("fp32",),
    "float64": ("fp64",),
    "double": ("fp64",),
    "dtype": ("dtypes.compute",),
    "precision": ("dtypes.compute",),
    "param_dtype": ("dtypes.compute",),
    "reduce_dtype": ("dtypes.grad_comm",),
    # training
    "learning_rate": ("train.lr",),
    "batch_size": ("train.global_batch", "train.micro_batch"),
    "batch": ("train.global_batch", "train.micro_batch"),
    "bs": ("train.global_batch", "train.micro_batch"),
    "mbs": ("train.micro_batch",),
    "gbs": ("train.global_batch",),
    "gradient_accumulation": ("train.global_batch", "train.micro_batch"),
    "gradient_accumulation_steps": ("train.global_batch", "train.micro_batch"),
    "grad_accum": ("train.global_batch", "train.micro_batch"),
    "sequence_length": ("train.seq_len",),
    "context_length": ("train.seq_len",),
    "max_seq_len": ("train.seq_len",),
    "iterations": ("train.steps",),
    "iters": ("train.steps",),
    "max_steps": ("train.steps",),
    "epochs": ("train.steps",),
    "wd": ("train.weight_decay",),
    "grad_clip": ("train.clip_norm",),
    "clip_grad": ("train.clip_norm",),
    "max_grad_norm": ("train.clip_norm",),
    "warmup": ("train.warmup_steps",),
    "betas": ("train.beta1", "train.beta2"),
    "adam": ("adamw",),
    "dataset": ("data.kind", "data.path"),
    # model
    "hidden_size": ("model.hidden",),
    "dim": ("model.hidden",),
    "d_model": ("model.hidden",),
    "intermediate_size": ("model.ffn_hidden",),
    "num_layers": ("model.layers",),
    "n_layers": ("model.layers",),
    "num_hidden_layers": ("model.layers",),
    "num_attention_heads": ("model.heads",),
    "n_heads": ("model.heads",),
    "vocab_size": ("model.vocab",),
    "activation_checkpointing": ("model.recompute",),
    "checkpointing": ("model.recompute",),
    # processes
    "world_size": ("launch.ranks",),
    "nproc": ("launch.ranks",),
    "nproc_per_node": ("launch.ranks",),
    "gpus": ("launch.ranks", "launch.device"),
    "num_gpus": ("launch.ranks",),
    "processes": ("launch.ranks",),
    "gpu": ("cuda",),
    "timeout": ("launch.timeout_seconds",),
    # a sweep file
    "grid": ("matrix",),
    "axes": ("matrix",),
    "defaults": ("base",),
    "config": ("base",),
    "runs": ("repeat",),
}
"""What other tools and papers call it -> what it is called here."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x' or 'y'?`, or an empty string.

    The same word in another section, the same thing under another name, or the nearest spelling.
    """
    choices = list(known)
    near = _same_leaf(word, choices) or _same_meaning(word, choices)
    near = near or difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _leaf(word: str) -> str:
    return word.rpartition(".")[2]


def _same_leaf(word: str, known: Collection[str]) -> list[str]:
    return [one for one in known if one != word and _leaf(one) == _leaf(word)]


def _same_meaning(word: str, known: Collection[str]) -> list[str]:
    plain = _leaf(word).strip().lower().replace("-", "_")
    return [one for one in _WORDS_ELSEWHERE.get(plain, ()) if one in known]
