"""What an engine did in one step, counted instead of timed: the account, and sums over it.

[Note: counted steps] A run with `measure.counts` counts steps behind its last timed one, so that
its times stand. It goes on until two steps in a row count the same on every rank (an engine may do
something now and then); if none do, what differs is named in `varying`. Counts are sums over ranks.
A dispatched operation is what torch's dispatcher hands to a kernel or to a view: below autograd,
and below tensor subclasses such as DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from bench.record import RunRecord, understood

Kind = Literal[
    "compute",
    "view",
    "cast",
    "copy",
    "fill",
    "collective",
    "wait",
    "resize",
    "host_read",
    "python_call",
    "python_line",
    "kernel_launch",
]
MOVES: Final = ("cast", "copy", "fill")
_DISPATCHED: Final = ("compute", "view", *MOVES, "collective", "host_read")


class CountRow(BaseModel):
    """Equal events of one step, over all ranks.

    operation: the dispatcher's name, `aten.copy_`; `c10d.allgather_` for a collective; for a wait
    what was called. dtype: of the result; of a cast `float32>bfloat16`. site: innermost frame of
    the engine, or else of whoever called torch, as `path/below/the/checkout.py:function`. line: of
    that frame, in one of the events. bytes: read and written; of a collective its full buffer.
    allocations: new storages and storages that grew, with `allocated_bytes`. exposed: waits for a
    collective since whose issue no matrix product ran, so that nothing hid it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    operation: str
    kind: Kind
    dtype: str = ""
    site: str = ""
    line: int = 0
    count: int = 0
    bytes: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    exposed: int = 0

    @property
    def name(self) -> str:
        """As policies name it: `aten._to_copy float32>bfloat16`."""
        return f"{self.operation} {self.dtype}".rstrip()


class Rates(BaseModel):
    """What things cost on the machine that counted; for estimates, never for verdicts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    copied_bytes_per_second: float
    wire_bytes_per_second: float | None = None
    seconds_per_operation: float
    seconds_per_call: float
    seconds_per_line: float = 0.0

    def milliseconds(self, row: CountRow) -> float:
        """About how long `row` takes on one thread, if nothing hides it; 0 for waits: who knows."""
        if row.kind == "wait":
            return 0.0
        if row.kind == "python_call":
            return row.count * self.seconds_per_call * 1e3
        if row.kind == "python_line":
            return row.count * self.seconds_per_line * 1e3
        rate = self.copied_bytes_per_second
        if row.kind == "collective":
            rate = self.wire_bytes_per_second or rate
        return (row.count * self.seconds_per_operation + row.bytes / rate) * 1e3


class StepCounts(BaseModel):
    """`counts.json`: one step over all ranks. units: modules that are sharded as one, at least 1.

    varying: rows that no two counted steps in a row agree about ([Note: counted steps]).
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    ranks: int
    units: int
    microbatches: int
    rows: tuple[CountRow, ...]
    varying: tuple[str, ...] = ()
    rates: Rates | None = None


def step_counts(record: RunRecord) -> StepCounts | None:
    """The counts of a run; None where it did not count, or they cannot be read."""
    return understood(StepCounts, record.counts)


def by_name(rows: Iterable[CountRow]) -> dict[str, CountRow]:
    """Rows of one name added up, wherever they were called from."""
    sums: dict[str, CountRow] = {}
    for row in rows:
        sums[row.name] = added(sums[row.name], row) if row.name in sums else row
    return {name: row.model_copy(update={"site": "", "line": 0}) for name, row in sums.items()}


_AMOUNTS: Final = ("count", "bytes", "allocations", "allocated_bytes", "exposed")


def added(row: CountRow, other: CountRow) -> CountRow:
    """Two rows of one name as one."""
    return row.model_copy(update={n: getattr(row, n) + getattr(other, n) for n in _AMOUNTS})


def less(row: CountRow, other: CountRow | None) -> CountRow:
    """What `row` has more than `other`, which may be absent."""
    if other is None:
        return row
    return row.model_copy(update={n: getattr(row, n) - getattr(other, n) for n in _AMOUNTS})


def _of_kinds(amount: str, *kinds: str) -> Callable[[CountRow], int]:
    def counted(row: CountRow) -> int:
        return int(getattr(row, amount)) if not kinds or row.kind in kinds else 0

    return counted


COUNTED: Final[Mapping[str, tuple[str, Callable[[CountRow], int]]]] = {
    "operations": ("operations", _of_kinds("count", *_DISPATCHED)),
    "copies": ("copies, casts and fills", _of_kinds("count", *MOVES)),
    "copied_bytes": ("bytes copied", _of_kinds("bytes", *MOVES)),
    "allocations": ("allocations", _of_kinds("allocations")),
    "allocated_bytes": ("bytes allocated", _of_kinds("allocated_bytes")),
    "collectives": ("collectives", _of_kinds("count", "collective")),
    "collective_bytes": ("bytes of collectives", _of_kinds("bytes", "collective")),
    "waits": ("waits", _of_kinds("count", "wait")),
    "exposed_waits": ("waits behind no compute", _of_kinds("exposed")),
    "host_reads": ("reads by the host", _of_kinds("count", "host_read")),
    "python_calls": ("Python calls", _of_kinds("count", "python_call")),
    "python_lines": ("Python lines", _of_kinds("count", "python_line")),
    "kernel_launches": ("kernel launches", _of_kinds("count", "kernel_launch")),
}
"""Metric -> its title, and what one row adds to it. All per step, over all ranks."""


def totals(record: RunRecord) -> dict[str, int]:
    """Every metric of `COUNTED` of one run; empty where it did not count."""
    counts = step_counts(record)
    if counts is None:
        return {}
    return {name: sum(map(of_row, counts.rows)) for name, (_, of_row) in COUNTED.items()}
