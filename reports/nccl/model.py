"""Facts that one line of a log states, the versions of NCCL that print it, and what was not read.

Facts are named tuples: they are keys of every tally, and a tuple's hash costs no Python call.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Version = tuple[int, int, int]

OLDEST: Final[Version] = (0, 0, 0)
NEWEST: Final[Version] = (99, 99, 99)
_DOTTED: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})")


class Versions(NamedTuple):
    """All versions from `low` to `high`, both included."""

    low: Version = OLDEST
    high: Version = NEWEST

    def intersection(self, other: Versions) -> Versions | None:
        """Versions in both; None where there is no such version."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Versions(low, high) if low <= high else None

    def all_before(self, version: Version) -> bool:
        """Whether every version of the interval is older than `version`."""
        return self.high < version

    def all_from(self, version: Version) -> bool:
        """Whether every version of the interval is `version` or newer."""
        return self.low >= version

    def all_in(self, other: Versions) -> bool:
        """Whether every version of the interval is one of `other`."""
        return self.intersection(other) == self

    def __str__(self) -> str:
        low, high = (".".join(map(str, one)) for one in (self.low, self.high))
        if self.low == self.high:
            return low
        if self == ANY:
            return "unknown"
        if self.high == NEWEST:
            return f"{low} or later"
        return f"{high} or earlier" if self.low == OLDEST else f"{low} to {high}"


ANY: Final = Versions()


def exactly(text: str) -> Versions | None:
    """The one version in `2.27.3`, or None for anything else."""
    match = _DOTTED.fullmatch(text)
    if match is None:
        return None
    version = (int(match[1]), int(match[2]), int(match[3]))
    return Versions(version, version)


_MOST_SHAPES: Final = 500
_SHOWN_CHARACTERS: Final = 160
_SHOWN_DAMAGED: Final = 3
COLLECTIVES: Final = (
    "AllGather",
    "AllGatherV",
    "AllReduce",
    "AlltoAll",
    "Broadcast",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
)
_WORD: Final = re.compile(r"[A-Za-z]{2,40}")
_SHORTEST_CUT: Final = 3
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def operations_named(text: bytes) -> set[str]:
    """Operations that a piece of a line may be about; its first and last word may be cut."""
    shown = text.decode("ascii", "replace").strip()
    found: set[str] = set()
    for match in _WORD.finditer(shown):
        word = match.group()
        if word in COLLECTIVES:
            found.add(word)
        if len(word) >= _SHORTEST_CUT:
            first, last = match.start() == 0, match.end() == len(shown)
            found |= {o for o in COLLECTIVES if first and o.endswith(word)}
            found |= {o for o in COLLECTIVES if last and o.startswith(word)}
    return found


@dataclass
class Unread:
    """Counts of lines that carry no fact.

    ignored: text without a NCCL prefix, and NCCL messages that are known to carry no evidence.
    damaged: pieces of lines that were cut, glued or overwritten; damaged_until: by operation that
    such a piece names, how many iterations had ended at the last. overlong: lines beyond the
    longest that is read. unknown: NCCL messages of other forms, by shape (numbers replaced).
    """

    ignored: int = 0
    damaged: int = 0
    damaged_until: dict[str, int] = field(default_factory=dict)
    overlong: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged_examples: list[str] = field(default_factory=list)

    def add_unknown(self, message: str) -> None:
        """Count a message by its shape."""
        shape = _NUMBER.sub("#", message)[:_SHOWN_CHARACTERS]
        if shape not in self.unknown and len(self.unknown) >= _MOST_SHAPES:
            shape = "(other forms)"
        self.unknown[shape] += 1
        self.examples.setdefault(shape, message[:_SHOWN_CHARACTERS])

    def add_damaged(self, text: bytes, iteration: int, count: int = 1) -> None:
        """Count pieces of lines that cannot be trusted; so many iterations had ended."""
        self.damaged += count
        for operation in operations_named(text):
            self.damaged_until[operation] = max(iteration, self.damaged_until.get(operation, 0))
        shown = text[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
        self.damaged_examples += [shown] * min(count, _SHOWN_DAMAGED - len(self.damaged_examples))


Kind = Literal["regular", "symmetric", "copy_engine", "hierarchical_ce"]
BytesAre = Literal["per_rank", "total", "unknown"]

MAX_QUOTE_CHARACTERS: Final = 240


class Choice(NamedTuple):
    """One TUNING line: the kernel chosen for a call, or for `works` calls together.

    kind: None where the line is cut before what tells it. operation: None where the version does
    not print it (2.20 to 2.22). size_bytes: as printed; `bytes_are` says what that means (per_rank:
    input of AllGather, output of ReduceScatter, whole buffer of AllReduce; total: the larger of
    input and output; unknown: cut off). what: the kernel, "" where it is cut off. works: calls in
    one symmetric launch, whose bytes are summed; None where the version does not print it.
    versions: those that print this form.
    """

    kind: Kind | None
    operation: str | None
    size_bytes: int
    what: str
    versions: Versions
    works: int | None = None
    bytes_are: BytesAre = "per_rank"

    @property
    def cut(self) -> bool:
        """Whether a part of the line is missing."""
        return not self.what

    @property
    def printed_by_every_rank(self) -> bool:
        """Symmetric lines of 2.27; every other line comes from rank 0 of the communicator alone."""
        return self.kind == "symmetric" and self.works is None


class CollectiveCall(NamedTuple):
    """What one COLL line says about a call, but for its buffers. `comm` is the printed pointer."""

    operation: str
    elements: int
    datatype: int
    reduction: int
    comm: str
    ranks: int


class StateChange(NamedTuple):
    """A line that changes or describes the state of its process.

    kind: a name of `grammar`. thread: id of the printing thread, "" if unknown. values: the fields
    of the line, in the order of its pattern. text: the line, for quoting.
    """

    kind: str
    thread: str
    values: tuple[str | None, ...]
    text: str


# Elements of ncclDataType_t in its order: name and bytes.
DATATYPES: Final = (
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("float8_e4m3", 1),
    ("float8_e5m2", 1),
)
REDUCTIONS: Final = ("sum", "prod", "max", "min", "avg")
SCALED_BY_RANKS: Final = frozenset({"AllGather", "ReduceScatter"})


def call_bytes(call: CollectiveCall) -> int | None:
    """Count times element size, as TUNING lines print since 2.24; None for an unknown type."""
    if call.datatype >= len(DATATYPES):
        return None
    return call.elements * DATATYPES[call.datatype][1]


def expected_bytes(call: CollectiveCall, choice: Choice) -> int | None:
    """What the TUNING line of `call` would print in the version of `choice`."""
    size_bytes = call_bytes(call)
    if size_bytes is None or choice.bytes_are == "per_rank":
        return size_bytes
    return size_bytes * call.ranks if call.operation in SCALED_BY_RANKS else size_bytes
