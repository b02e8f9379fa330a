"""Models under every layout, for tests that save under one and load under another.

A layout is (ranks, inner strategy, outer strategy or "none"). With fewer ranks than the pool has,
every replica of the layout works in a folder of its own; hybrid layouts are 2x2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer, gather_full
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import WORLD, on_two_axes
from oracle.ranks import mesh_of_every_replica as mesh
from oracle.sharded import STRATEGIES

Layout = tuple[int, str, str]

LAYOUTS: list[Layout] = [
    *((size, inner, "none") for size in (1, 2, 4) for inner in STRATEGIES),
    *((WORLD, inner, "no_shard") for inner in STRATEGIES),
    *((WORLD, inner, "optim") for inner in STRATEGIES[1:]),
]


@dataclass
class TrainedToy:
    """A sharded model with its optimizer. replica: which of the equal groups this rank is in."""

    name: str
    layout: Layout
    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def replica(self) -> int:
        size, _, outer = self.layout
        return 0 if outer != "none" else mesh(size).get_local_rank("replica")

    def folder(self, parent: str) -> Path:
        return Path(parent) / f"{'-'.join(map(str, self.layout))}-{self.replica}"

    def train(self, steps: int = 1) -> None:
        """Every rank of every layout takes the same batch, so that all layouts learn alike."""
        for step in range(steps):
            value = loss(self.model(batch(self.name, 0, step, torch.float32)))
            value.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(batch(self.name, 0, 9, torch.float32)).clone()

    def whole(self) -> dict[str, torch.Tensor]:
        """As below."""
        return whole(self.model, self.optimizer)


def whole(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, gathered; a collective of the layout's ranks."""
    names = {p: name for name, p in model.named_parameters()}
    found = {name: gather_full(p.detach()) for p, name in names.items()}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    for p, values in optimizer.state.items():
        found |= {f"{names[p]}/{key}": gather_full(value) for key, value in values.items()}
    return {name: value.reshape(-1).clone() for name, value in found.items()}


def toy(
    name: str,
    layout: Layout,
    seed: int = 7,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **arguments: Any,
) -> TrainedToy:
    """The toy model `name` under `layout`, with an optimizer that has not stepped."""
    size, inner, outer = layout
    where: dict[str, Any] = {"device_mesh": mesh(size), "dp_shard_dim": "dp"}
    if outer != "none":
        where = on_two_axes(outer)
    arguments.setdefault("mixed_precision_policy", MixedPrecisionPolicy(torch.float32))
    model = fully_shard_model(
        build(name, seed=seed),
        fsdp_unit_modules=list(TOYS[name].units),
        zero_dp_strategy=inner,
        **where,
        **arguments,
    )
    # The decay and momentum that optimizers have in common give every trainable weight state.
    trainable = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": 0.05}
    if optimizer is torch.optim.SGD:
        options["momentum"] = 0.9
    return TrainedToy(name, layout, model, fully_shard_optimizer(optimizer(trainable, **options)))


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bit-equal, or that only one side has."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )
