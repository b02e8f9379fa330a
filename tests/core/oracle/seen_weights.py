"""What modules compute with, as they see it."""

from __future__ import annotations

from typing import Any

import torch

from oracle.sharded import Sharded


def weights_seen(toy: Sharded) -> dict[str, torch.Tensor]:
    """In a rank: every compute weight that a module sees during a forward pass, by name."""
    names = {id(module): name for name, module in toy.model.module.named_modules()}
    seen: dict[str, torch.Tensor] = {}

    def note(module: torch.nn.Module, *_: Any) -> None:
        for child in module.modules():
            for key, value in child._parameters.items():
                if value is not None and not hasattr(value, "placements"):
                    seen[f"{names[id(child)]}.{key}".lstrip(".")] = value.detach().clone()

    for module in toy.model.module.modules():
        module.register_forward_pre_hook(note)
    toy.forward()
    return seen
