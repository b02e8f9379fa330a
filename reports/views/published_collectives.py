"""Times of collectives that others have published, to set beside one's own on the same hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.spec import ResolvedRun

_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Published:
    """Times of one operation on one kind of hardware, BF16. microseconds: by size in bytes."""

    operation: str
    registration: str
    microseconds: dict[int, float]
    ranks: int = 8
    device: str = "H100"
    source: str = "Megatron-LM pull request 5596"


PUBLISHED: Final = (
    Published(
        "all_gather",
        "plain",
        {2 * _MIB: 20.2, 8 * _MIB: 43.4, 32 * _MIB: 118.9, 128 * _MIB: 385.3},
    ),
    Published(
        "all_gather",
        "symmetric",
        {2 * _MIB: 10.9, 8 * _MIB: 27.4, 32 * _MIB: 95.3, 128 * _MIB: 363.2},
    ),
    Published("reduce_scatter", "plain", {2 * _MIB: 18.6, 8 * _MIB: 47.0, 32 * _MIB: 112.6}),
    Published("reduce_scatter", "symmetric", {2 * _MIB: 10.8, 8 * _MIB: 28.8, 32 * _MIB: 100.5}),
)


def published_microseconds(resolved: ResolvedRun) -> tuple[float, Published] | None:
    """What is published of the same operation, size, dtype, memory and ranks; None for others."""
    collective, launch = resolved.collective, resolved.launch
    if collective is None or launch.device != "cuda" or launch.copy_engine or launch.nodes > 1:
        return None
    for one in PUBLISHED:
        asked = (collective.operation, collective.registration, launch.ranks)
        if asked == (one.operation, one.registration, one.ranks):
            found = one.microseconds.get(collective.size_bytes)
            if found is not None and resolved.dtypes.compute == "bf16":
                return found, one
    return None
