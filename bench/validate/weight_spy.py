"""Which weights the modules of a model really read: seen by hooks, not reported by the engine."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightSpy:
    """Hooks `model`, before an engine takes it over, and copies every weight that a module reads.

    A module reads its own parameters, and those named in its attribute `reads`. Names are those of
    `model`; a tied weight has its first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._first_names = {id(p): name for name, p in model.named_parameters()}
        self._seen: dict[str, Tensor] = {}
        self.changed: list[tuple[int, str]] = []
        self._microbatch = 0
        for module in model.modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            names += getattr(module, "reads", ())
            if names:
                read = {name: self._first_name(module, name) for name in names}
                module.register_forward_pre_hook(self._hook(read))

    def begin(self, microbatch: int) -> None:
        """A microbatch begins; with the first one of a step, everything seen is forgotten."""
        self._microbatch = microbatch
        if microbatch == 0:
            self._seen, self.changed = {}, []

    @property
    def seen(self) -> dict[str, Tensor]:
        """First sight of every weight in this step."""
        return dict(self._seen)

    def _first_name(self, module: nn.Module, name: str) -> str:
        return self._first_names[id(module.get_parameter(name))]

    def _hook(self, read: dict[str, str]) -> Any:
        def look(module: nn.Module, _inputs: Any) -> None:
            with torch.no_grad():
                for name, first in read.items():
                    self._note(first, attrgetter(name)(module))

        return look

    def _note(self, name: str, value: Tensor) -> None:
        value = value.detach()
        if isinstance(value, DTensor):
            value = value.to_local()
        known = self._seen.get(name)
        if known is None:
            self._seen[name] = value.clone()
        elif known.shape != value.shape or not torch.equal(known, value):
            entry = (self._microbatch, name)
            if entry not in self.changed:
                self.changed.append(entry)
