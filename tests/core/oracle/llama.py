"""A small Llama of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch


def llama(tied: bool) -> Any:
    """Two layers, from a config; equal weights on all ranks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
