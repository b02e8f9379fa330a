"""The tensor storage that ranks held between two steps, by who made it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from bench.record import RunRecord, understood


class LiveRow(BaseModel):
    """Storages that one call site has made. line: of one of them.

    site: as of counts (`bench.meters.call_sites`); "" where torch's dispatcher did not count.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    site: str = ""
    line: int = 0
    bytes: int
    storages: int


class LiveStorage(BaseModel):
    """`live` in `memory.json`, of all ranks together.

    step: behind which it was looked at, before the next. bytes: by rank, every storage once.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    bytes: tuple[int, ...]
    rows: tuple[LiveRow, ...] = ()

    @property
    def bytes_per_rank(self) -> float:
        """The mean, which a rise on any rank raises."""
        return sum(self.bytes) / len(self.bytes)


def live_storage(record: RunRecord) -> LiveStorage | None:
    """That of a run; None where it was not looked at, or cannot be read."""
    live = understood(LiveStorage, (record.memory or {}).get("live"))
    return live if live and live.bytes else None


def over_ranks(ranks: Sequence[LiveStorage]) -> LiveStorage:
    """One account of what every rank held."""
    sites: dict[str, LiveRow] = {}
    for row in (row for rank in ranks for row in rank.rows):
        known = sites.setdefault(row.site, row.model_copy(update={"bytes": 0, "storages": 0}))
        sums = {"bytes": known.bytes + row.bytes, "storages": known.storages + row.storages}
        sites[row.site] = known.model_copy(update=sums)
    return LiveStorage(
        step=ranks[0].step,
        bytes=tuple(size for rank in ranks for size in rank.bytes),
        rows=tuple(sorted(sites.values(), key=lambda row: (-row.bytes, row.site))),
    )


def risen(base: LiveStorage, head: LiveStorage) -> list[tuple[LiveRow, int]]:
    """Sites that hold more than before with how many bytes more, the largest first."""
    before = {row.site: row.bytes for row in base.rows}
    more = [(row, row.bytes - before.get(row.site, 0)) for row in head.rows]
    return sorted(((row, size) for row, size in more if size > 0), key=lambda pair: -pair[1])
