"""The parameters of the toy models as plans want them, read off the modules themselves."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from mfsdp_core.plan.grouping import ParameterFacts
from oracle.models import TOYS, build


@cache
def facts_of(name: str, dtype: torch.dtype) -> list[ParameterFacts]:
    """Every physical parameter of a toy in registration order; a tied one has all its names."""
    model = build(name, dtype)
    units = [path for path, module in model.named_modules() if isinstance(module, TOYS[name].units)]
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(path)

    def unit(path: str) -> str:
        return next((one for one in units if path.startswith(f"{one}.")), "")

    return [
        ParameterFacts(
            tuple(paths),
            unit(paths[0]) if len({unit(path) for path in paths}) == 1 else "",
            tuple(parameter.shape),
            name_of(dtype),
            parameter.requires_grad,
        )
        for parameter, paths in found.values()
    ]


def name_of(dtype: torch.dtype) -> str:
    """torch's name of `dtype` without prefix."""
    return str(dtype).removeprefix("torch.")
