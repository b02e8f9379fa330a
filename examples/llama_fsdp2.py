"""A training script of torchtitan's shape, under FSDP2 or under mfsdp_core's front: one import.

    torchrun --nproc-per-node 2 examples/llama_fsdp2.py            # mfsdp_core.fsdp2
    torchrun --nproc-per-node 2 examples/llama_fsdp2.py torch      # torch.distributed.fsdp

Prints loss and norm of gradients of every step, and the most bytes of live tensors between steps.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

if sys.argv[1:] == ["torch"]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
else:
    from mfsdp_core.fsdp2 import MixedPrecisionPolicy, fully_shard  # type: ignore[no-redef]

WIDTH, LAYERS, HEADS, WORDS, LENGTH = 64, 4, 4, 256, 32


class Layer(nn.Module):
    """Attention and a gated product, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, WIDTH] to the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return out


class Transformer(nn.Module):
    """Words in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(n): Layer() for n in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def init_weights(self) -> None:
        """Every parameter, by a rule that does not draw, so that all shardings begin alike."""
        for name, parameter in sorted(self.named_parameters()):
            with torch.no_grad():
                parameter.fill_(0.5 if "norm" in name else 0.02)
                if parameter.ndim > 1:
                    parameter.mul_(1 + len(name) % 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to [batch, length, WORDS]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def parallelize(model: Any, mesh: Any) -> None:
    """As torchtitan applies it: embeddings, layers, the head, and the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    fully_shard(model.tok_embeddings, reshard_after_forward=True, **options)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    fully_shard(model, **options)


def live_bytes() -> int:
    """Of the storages of all tensors that Python holds."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            local = getattr(one, "_local_tensor", one)
            if local.device.type == "cpu":
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def main() -> None:
    """Train for a few steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Transformer()
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    data = torch.Generator().manual_seed(rank)
    most = 0
    for step in range(6):
        losses = []
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            tokens = torch.randint(0, WORDS, (4, LENGTH + 1), generator=data)
            tokens[:, 1:] = (tokens[:, :1] + torch.arange(1, LENGTH + 1)) % WORDS
            logits = model(tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
            losses.append(loss.detach())
        del logits, loss
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        most = max(most, live_bytes())
        mean = torch.stack(losses).sum()
        dist.all_reduce(mean)  # noqa: TID251 - a script of torch's
        if rank == 0:
            mean = mean / dist.get_world_size()
            print(f"step {step} loss {mean:.6f} norm {norm.full_tensor():.6f}", flush=True)
    if rank == 0:
        print(f"live {most} bytes between steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
