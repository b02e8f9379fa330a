"""Meshes of the world by the sizes and names of their dimensions, and the arguments that shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Shape:
    """flattened: dimensions that become one, by its name. shard, outer, tensor: as the arguments.

    Every method is called on all ranks.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    shard: str
    flattened: tuple[str, ...] = ()
    outer: str | None = None
    tensor: str | None = None

    @property
    def _data(self) -> tuple[str, ...]:
        return ((self.outer,) if self.outer else ()) + (self.flattened or (self.shard,))

    @cache  # noqa: B019 - of few shapes, which are constants
    def root(self) -> DeviceMesh:
        """Of all dimensions."""
        root = init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)
        if self.flattened:
            root[self.flattened]._flatten(self.shard)
        return root

    @cache  # noqa: B019 - of few shapes, which are constants
    def arguments(self) -> dict[str, Any]:
        """Of `fully_shard_model`."""
        given = {"device_mesh": self.root(), "dp_shard_dim": self.shard, "tp_dim": self.tensor}
        if self.outer:
            given["dp_outer_dim"] = self.outer
            given["hybrid_fsdp_group"] = self.root()[self._data]._flatten("hybrid").get_group()
        return {key: value for key, value in given.items() if value is not None}

    def data_rank(self) -> int:
        """This rank among those that share its parameters; from the mesh alone."""
        number = 0
        for dim in self._data:
            number = number * self.root()[dim].size() + self.root().get_local_rank(dim)
        return number
