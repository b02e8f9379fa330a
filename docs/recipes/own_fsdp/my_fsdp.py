"""A fully sharded data parallel of our own: weights lie flat, in equal parts, on the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Shard(torch.autograd.Function):
    """This rank's part of a weight to the whole; the gradient back to this rank's part."""

    @staticmethod
    def forward(ctx, part, shape, count):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.detach())
        ctx.count = count
        return torch.cat(parts)[:count].view(shape)

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size()
        flat = F.pad(gradient.flatten(), (0, -ctx.count % ranks))
        dist.all_reduce(flat)
        return flat.chunk(ranks)[dist.get_rank()] / ranks, None, None


class MyFsdp(nn.Module):
    """`module`, whose weights are whole only while a unit of it runs."""

    def __init__(self, module):
        super().__init__()
        self.module, self.parts, self.shapes = module, nn.ParameterDict(), {}
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for name, weight in list(module.named_parameters()):
            flat = F.pad(weight.detach().flatten(), (0, -weight.numel() % ranks))
            part = nn.Parameter(flat.chunk(ranks)[rank].clone(), weight.requires_grad)
            self.parts[name.replace(".", "/")] = part
            self.shapes[name] = weight.shape

    def forward(self, *batch):
        whole = {
            name: Shard.apply(self.parts[name.replace(".", "/")], shape, shape.numel())
            for name, shape in self.shapes.items()
        }
        return torch.func.functional_call(self.module, whole, batch)

    def clip_grad_norm_(self, bound):
        squares = [p.grad.square().sum() for p in self.parts.values() if p.grad is not None]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        for part in self.parts.values():
            if part.grad is not None:
                part.grad.mul_(min(1.0, bound / (total.sqrt() + 1e-6)))
        return total.sqrt()


def shard(model):
    wrapped = MyFsdp(model)
    return wrapped, torch.optim.AdamW(p for p in wrapped.parts.values() if p.requires_grad)
