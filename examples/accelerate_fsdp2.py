"""FSDP2 as accelerate prepares it, with mfsdp_core in the place of torch's `fully_shard`.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py            # mfsdp_core.fsdp2
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py torch      # torch.distributed.fsdp

accelerate imports `fully_shard` when it prepares a model, so that replacing the name is enough. It
takes FSDP for devices only, so this script sets it on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.fsdp
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

import mfsdp_core.fsdp2

if sys.argv[1:] != ["torch"]:
    for name in ("fully_shard", "FSDPModule"):
        setattr(torch.distributed.fsdp, name, getattr(mfsdp_core.fsdp2, name))


def main() -> None:
    """Train for a few steps."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._shared_state |= {
        "distributed_type": DistributedType.FSDP,
        "fsdp_plugin": plugin,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(4):
        for _ in range(2):
            with accelerator.accumulate(model):
                start = torch.randint(64, (2, 1), generator=data)
                tokens = (start + torch.arange(16)) % 64
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                norm: Any = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        norm = getattr(norm, "full_tensor", lambda whole=norm: whole)()
        accelerator.print(f"step {step} loss {mean:.6f} norm {norm:.6f}")
    accelerator.print(f"run by {type(model).__mro__[1].__module__}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
