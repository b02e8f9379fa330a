"""Facts read from a log: what one line says, nothing that needs a second line.

Beside them: the version of NCCL that a log proves, exactly or as an interval, and what was not
understood, counted by shape, so that nothing is left out silently.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

Version = tuple[int, int, int]

OLDEST: Version = (0, 0, 0)
NEWEST: Version = (99, 99, 99)
_DOTTED = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class Versions:
    """All versions from `low` to `high`, both included."""

    low: Version = OLDEST
    high: Version = NEWEST

    @property
    def exact(self) -> bool:
        """Whether only one version is left."""
        return self.low == self.high

    def meet(self, other: Versions) -> Versions | None:
        """Versions in both; None where there is no such version."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Versions(low, high) if low <= high else None

    def all_before(self, version: Version) -> bool:
        """Whether every version of the interval is older than `version`."""
        return self.high < version

    def all_from(self, version: Version) -> bool:
        """Whether every version of the interval is `version` or newer."""
        return self.low >= version

    def __str__(self) -> str:
        if self.exact:
            return dotted(self.low)
        if self == Versions():
            return "unknown"
        if self.high == NEWEST:
            return f"{dotted(self.low)} or later"
        if self.low == OLDEST:
            return f"{dotted(self.high)} or earlier"
        return f"{dotted(self.low)} to {dotted(self.high)}"


ANY = Versions()


def dotted(version: Version) -> str:
    """`2.27.3`."""
    return ".".join(map(str, version))


def parse(text: str) -> Version | None:
    """The version in `2.27.3`, or None for anything else."""
    match = _DOTTED.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


_MOST_SHAPES: Final = 500
_SHOWN_CHARACTERS: Final = 160
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


@dataclass
class Unread:
    """Counts of lines that carry no fact.

    ignored: text without a NCCL prefix, and NCCL messages that are known to carry no evidence.
    damaged: pieces of lines that were cut, glued or overwritten. overlong: lines beyond the longest
    that is read. unknown: NCCL messages of other forms, by shape (numbers replaced).
    """

    ignored: int = 0
    damaged: int = 0
    overlong: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged_examples: list[str] = field(default_factory=list)

    @property
    def unknown_lines(self) -> int:
        """NCCL messages of unknown form."""
        return self.unknown.total()

    def add_unknown(self, message: str) -> None:
        """Count a message by its shape."""
        shape = _NUMBER.sub("#", message)[:_SHOWN_CHARACTERS]
        if shape not in self.unknown and len(self.unknown) >= _MOST_SHAPES:
            shape = "(other forms)"
        self.unknown[shape] += 1
        self.examples.setdefault(shape, message[:_SHOWN_CHARACTERS])

    def add_damaged(self, text: bytes) -> None:
        """Count a piece of a line that cannot be trusted."""
        self.damaged += 1
        if len(self.damaged_examples) < 3:  # noqa: PLR2004 - enough to recognise the damage
            self.damaged_examples.append(text[:_SHOWN_CHARACTERS].decode("utf-8", "replace"))

    def add(self, other: Unread) -> None:
        """Take over the counts of another stretch."""
        self.ignored += other.ignored
        self.damaged += other.damaged
        self.overlong += other.overlong
        self.unknown.update(other.unknown)
        self.examples = {**other.examples, **self.examples}
        self.damaged_examples = (self.damaged_examples + other.damaged_examples)[:3]


Kind = Literal["regular", "symmetric", "copy_engine", "hierarchical_ce"]
BytesAre = Literal["per_rank", "total"]

MAX_QUOTE_CHARACTERS = 240
_BUFFER_WORDS = 5
MOST_BUFFERS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """One TUNING line: the kernel chosen for a call, or for `works` calls together.

    operation: None where the version does not print it (2.20 to 2.22). size_bytes: as printed;
    `bytes_are` says what that means (per_rank: input of AllGather, output of ReduceScatter, whole
    buffer of AllReduce; total: the larger of input and output). works: calls in one symmetric
    launch, whose bytes are summed; None where the version does not print it. versions: those that
    print this form.
    """

    kind: Kind
    operation: str | None
    size_bytes: int
    bytes_are: BytesAre = "per_rank"
    algorithm: str = ""
    protocol: str = ""
    kernel: str = ""
    works: int | None = None
    versions: Versions = ANY

    @property
    def printed_by_every_rank(self) -> bool:
        """Symmetric lines of 2.27; every other line comes from rank 0 of the communicator alone."""
        return self.kind == "symmetric" and self.works is None

    @property
    def what(self) -> str:
        """The kernel in a few words."""
        if self.kind == "regular":
            return f"{self.algorithm} {self.protocol}"
        return self.kernel


@dataclass(frozen=True, slots=True)
class Call:
    """What one COLL line says about a call, but for its buffers. `comm` is the printed pointer."""

    operation: str
    count: int
    datatype: int
    reduction: int
    comm: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Event:
    """A line that changes or describes the state of its process.

    kind: a name of `grammar`. thread: id of the printing thread, "" if unknown. values: the fields
    of the line, in the order of its pattern. text: the line, for quoting.
    """

    kind: str
    thread: str
    values: tuple[str | None, ...]
    text: str


@dataclass(slots=True)
class Seen:
    """How often something was observed, with the first line that says so.

    buffers: distinct (send, receive) pointers, at most MOST_BUFFERS; more_buffers says there were
    others.
    """

    count: int = 0
    line: str = ""
    call_line: str = ""
    buffers: set[tuple[bytes, bytes]] = field(default_factory=set)
    more_buffers: bool = False

    def add_buffers(self, text: bytes) -> None:
        """The buffers in `COUNTER sendbuff P recvbuff P`; what is not of this form is left out."""
        words = text.split(b" ")
        if len(words) != _BUFFER_WORDS:
            self.more_buffers = True
            return
        pair = (words[2], words[4])
        if pair not in self.buffers:
            if len(self.buffers) < MOST_BUFFERS:
                self.buffers.add(pair)
            else:
                self.more_buffers = True

    def add(self, other: Seen) -> None:
        """Take over what `other`, which is later in the log, has seen."""
        self.count += other.count
        self.line = self.line or other.line
        self.call_line = self.call_line or other.call_line
        self.buffers |= other.buffers
        self.more_buffers |= other.more_buffers
        if len(self.buffers) > MOST_BUFFERS:
            self.buffers = set(sorted(self.buffers)[:MOST_BUFFERS])
            self.more_buffers = True


@dataclass(frozen=True, slots=True)
class Observation:
    """A choice and the call it was made for; one of them may be missing.

    grouped: the call was launched together with others of its communicator.
    """

    choice: Choice | None
    call: Call | None
    grouped: bool = False


Tally = dict[Observation, Seen]

# Elements of ncclDataType_t in its order: name and bytes.
DATATYPES: tuple[tuple[str, int], ...] = (
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
REDUCTIONS: tuple[str, ...] = ("sum", "prod", "max", "min", "avg")
SCALED_BY_RANKS = frozenset({"AllGather", "ReduceScatter"})


def call_bytes(call: Call) -> int | None:
    """Count times element size, as TUNING lines print since 2.24; None for an unknown type."""
    if call.datatype >= len(DATATYPES):
        return None
    return call.count * DATATYPES[call.datatype][1]


def total_bytes(operation: str | None, per_rank_bytes: int, ranks: int) -> int:
    """The larger of input and output, which TUNING lines of 2.20 to 2.23 print."""
    return per_rank_bytes * ranks if operation in SCALED_BY_RANKS else per_rank_bytes
