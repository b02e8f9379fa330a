"""Times per collective, as NCCL's Inspector plug-in writes them: one JSON object a record.

Records are read field by field, so that it does not matter whether they stand on one line, are
indented, or are wrapped by a collector. A field that stands a second time begins the next record.
From its version 6 on the number of ranks stands in a marker before many records.
"""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

_FIELD: Final = re.compile(
    rb'\\?"(coll|coll_algo|coll_proto|coll_msg_size_bytes|coll_exec_time_us|coll_busbw_gbs|n_ranks)'
    rb'\\?"\s{0,4}:\s{0,4}\\?"?([A-Za-z0-9_.+-]{1,60})'
)
_SIZE: Final = b"coll_msg_size_bytes"
_TIME: Final = b"coll_exec_time_us"
_MOST_KEYS: Final = 2_000


class TimedRow(NamedTuple):
    """Records of all ranks of one kind of collective, times in microseconds.

    ranks: of the communicator, 0 if unknown. kernel: "" if unknown. bus_bandwidth: in GB/s, None if
    no record has one.
    """

    operation: str
    size_bytes: int
    ranks: int
    kernel: str
    records: int
    median: float
    least: float
    most: float
    bus_bandwidth: float | None


Key = tuple[str, int, int, str]
"""The first fields of a row."""


@dataclass
class InspectorTimes:
    """Of all streams. left_out: records beyond the limit of kinds; _records: times and rates."""

    left_out: int = 0
    _records: dict[Key, tuple[array[float], array[float]]] = field(default_factory=dict)
    _open: dict[bytes, bytes] = field(default_factory=dict)

    def read(self, line: bytes) -> bool:
        """Take in the fields of a line; whether it had any."""
        has_field = False
        for match in _FIELD.finditer(line):
            has_field = True
            name, text = match.groups()
            if name in self._open:
                self.close(keep_ranks=name != b"n_ranks")
            self._open[name] = text
        return has_field

    def close(self, *, keep_ranks: bool = False) -> None:
        """End the record that is open; one without a time or a size is none."""
        said, self._open = self._open, {}
        if keep_ranks and b"n_ranks" in said:
            self._open[b"n_ranks"] = said[b"n_ranks"]
        size, ranks, time, rate = (
            _number(said.get(name)) for name in (_SIZE, b"n_ranks", _TIME, b"coll_busbw_gbs")
        )
        if b"coll" not in said or size is None or time is None:
            return
        chosen = (said.get(name, b"").decode() for name in (b"coll_algo", b"coll_proto"))
        kernel = " ".join(word for word in chosen if word not in ("", "unknown"))
        key = (said[b"coll"].decode(), int(size), int(ranks or 0), kernel)
        if key not in self._records and len(self._records) >= _MOST_KEYS:
            self.left_out += 1
            return
        times, rates = self._records.setdefault(key, (array("d"), array("d")))
        times.append(time)
        rates.extend([] if rate is None else [rate])

    def rows(self) -> list[TimedRow]:
        """One per kind of collective."""
        return [
            TimedRow(*key, len(t), median(t), min(t), max(t), median(rates) if rates else None)
            for key, (t, rates) in sorted(self._records.items())
        ]


def _number(text: bytes | None) -> float | None:
    try:
        value = float(text or b"")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
