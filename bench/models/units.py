"""Which modules of a model an engine shards and schedules as one.

A model names the classes in `unit_classes`; what lies outside of their instances is the root's.
"""

from __future__ import annotations

from torch import nn


def unit_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes that `model` names."""
    classes: tuple[type[nn.Module], ...] = getattr(model, "unit_classes", ())
    return classes


def units(model: nn.Module) -> list[nn.Module]:
    """Instances of those classes in registration order; of nested ones the outermost."""
    classes = unit_classes(model)
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, classes):
                found.append(child)
            else:
                walk(child)

    walk(model)
    return list(dict.fromkeys(found))
