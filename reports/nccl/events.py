"""A message of NCCL becomes an event: what every version prints.

A message is what follows `NCCL INFO ` or `NCCL WARN `. Its forms are the rows of `lines.toml`; NCCL
documents none of them, so whatever does not match completely is counted and shown, never guessed
at. Events are named tuples: they are keys of every tally, and a tuple's hash costs no Python call.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

Version = tuple[int, int, int]

OLDEST: Final[Version] = (0, 0, 0)
NEWEST: Final[Version] = (99, 99, 99)
_DOTTED: Final = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}")


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
        low, high = (".".join(map(str, version)) for version in (self.low, self.high))
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
    if not _DOTTED.fullmatch(text):
        return None
    first, second, third = map(int, text.split("."))
    return Versions((first, second, third), (first, second, third))


LINES: Final = tomllib.loads(Path(__file__).with_name("lines.toml").read_text(encoding="utf-8"))
"""The file of that name."""
COLLECTIVES: Final = tuple(LINES["collectives"])
_PARTS: Final[dict[str, str]] = LINES["parts"] | {"VARYING": LINES["varying"]}
_PART_NAME: Final = re.compile("|".join(_PARTS))


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern of the file, with its parts put in."""
    while _PART_NAME.search(text):
        text = _PART_NAME.sub(lambda name: _PARTS[name[0]], text)
    return re.compile(text, re.DOTALL)


def _of_bytes(text: str) -> re.Pattern[bytes]:
    return re.compile(_pattern(text).pattern.encode(), re.DOTALL)


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
    versions: those that print this form. channels: blocks of threads of the kernel, each on an SM
    of its own; None where the line does not print them.
    """

    kind: Kind | None
    operation: str | None
    size_bytes: int
    what: str
    versions: Versions
    works: int | None = None
    bytes_are: BytesAre = "per_rank"
    channels: int | None = None

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


Fact = Choice | CollectiveCall
Buffers = tuple[bytes, bytes]
"""Printed addresses that a call sends from and receives in."""
Stated = tuple[Fact, Buffers | None]
"""What a line states, and the buffers of a COLL line."""


class StateChange(NamedTuple):
    """A line that changes or describes the state of its process.

    kind: a name of `_EVENTS`. thread: id of the printing thread, "" if unknown. values: the fields
    of the line, in the order of its pattern. text: the line, for quoting.
    """

    kind: str
    thread: str
    values: tuple[str | None, ...]
    text: str


DATATYPES: Final[tuple[tuple[str, int], ...]] = tuple(
    (name, size) for name, size in LINES["datatypes"]
)
REDUCTIONS: Final = tuple(LINES["reductions"])
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


# NCCL's own prefix, wherever launchers and collectors have put it; time stamps can be any text.
#     HOST:PID:TID [DEVICE] NCCL INFO MESSAGE
#     HOST:PID:TID [DEVICE] FILE:LINE (FUNCTION) NCCL WARN MESSAGE
HEADER: Final = re.compile(
    rb"(?P<host>[A-Za-z0-9._-]{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10})"
    rb" \[(?P<device>-?\d{1,4})\]"
    rb" (?:NCCL INFO|[^ \t:]{1,120}:\d{1,6} (?:\([^() \t]{1,80}\) )?NCCL (?P<warning>WARN)) "
)
# Pieces of NCCL's own messages: where they stand before a prefix, the line was cut and glued.
FRAGMENT: Final = re.compile("|".join(LINES["fragments"]).encode())
_ESCAPES: Final = re.compile(rb"(?:\x1b|\xef\xbf\xbd|\xc2\x9b)\[[0-9;?]{0,16}[A-Za-z]")
# Some log drivers write <, >, & and the escape of colours so inside JSON strings.
_JSON_ESCAPES: Final = re.compile(rb"\\u00(3[ce]|26|1b)")
_REPEATED: Final = re.compile(rb"[ \t]*\[repeated (\d{1,9})x across cluster\].*\Z", re.DOTALL)


def plain(line: bytes) -> bytes:
    """`line` without terminal colours and without a carriage return at its end."""
    if rb"\u00" in line:
        line = _JSON_ESCAPES.sub(lambda code: bytes.fromhex(code[1].decode()), line)
    if b"\x1b" in line or b"\xef\xbf\xbd" in line or b"\xc2\x9b" in line:
        line = _ESCAPES.sub(b"", line)
    return line.rstrip(b"\r\n")


def without_repetition(message: bytes) -> tuple[bytes, int]:
    """The message without Ray's note that it stood for several lines, and how many those were."""
    match = _REPEATED.search(message) if b" across cluster]" in message else None
    return (message, 0) if match is None else (message[: match.start()], int(match[1]))


_LARGEST_BYTES: Final = 2**62


_FORMS: Final = tuple(
    (
        row["kind"],
        Versions((exactly(row["from"]) or ANY).low, (exactly(row.get("to", "")) or ANY).high),
        _of_bytes(row["match"]),
    )
    for row in LINES["choice"]
)


@lru_cache(maxsize=4096)
def tuning(message: bytes) -> Choice | None:
    """The choice that a TUNING line states; None if it is another line or an incomplete one."""
    forms = ((kind, of, pattern.match(message)) for kind, of, pattern in _FORMS)
    kind, versions, match = next((form for form in forms if form[2]), (None, ANY, None))
    if match is None:
        return None
    fields = {name: text.decode() for name, text in match.groupdict().items() if text is not None}
    size_bytes, works, channels = int(fields["size"]), fields.get("works"), fields.get("channels")
    if "low" in fields:  # the first and the last
        channels = str(int(fields["high"]) - int(fields["low"]) + 1)
    if size_bytes > _LARGEST_BYTES or (works and int(works) == 0):
        return None
    return Choice(
        kind,
        fields.get("operation"),
        size_bytes,
        fields.get("kernel")
        or f"{_name('algorithms', fields['algorithm'])} {_name('protocols', fields['protocol'])}",
        versions,
        None if works is None else int(works),
        "total" if versions.all_before((2, 24, 3)) else "per_rank",
        None if channels is None else int(channels),
    )


def _name(table: str, text: str) -> str:
    """`RING` of `Ring`, or of its number in the versions that print numbers."""
    if not text.lstrip("-").isdecimal():
        return text.upper()
    names: dict[int, str] = dict(enumerate(LINES[table]))
    return names.get(int(text), f"UNKNOWN({text})")


VARYING: Final = _of_bytes(LINES["varying"])
"""What differs between repetitions of a COLL line: its counter and its buffers."""
_CALL: Final = _of_bytes(LINES["call"])


def fact(message: bytes) -> Stated | None:
    """What a TUNING or COLL line states; None if it is another line or an incomplete one."""
    if b" Bytes -> " in message:
        choice = tuning(message)
        return None if choice is None else (choice, None)
    match = _CALL.match(message) if b": opCount " in message else None
    if match is None:
        return None
    operation, send, receive, count, datatype, reduction, comm, ranks = match.groups()
    call = CollectiveCall(
        operation.decode(), int(count), int(datatype), int(reduction), comm.decode(), int(ranks)
    )
    return call, (send, receive)


_MARK: Final = re.compile(rb"NCCL (INFO|WARN) ")
_SEARCHED_BYTES: Final = 400
# What a page puts in front of a line that was pasted.
_LEAD: Final = re.compile(rb"\A[\s>*+`'\"-]*")
# What is left of a prefix in front of the mark, behind any decoration.
_LEFT: Final = re.compile(
    rb"(?:(?<!\S)\[(\d{1,4})\] )?(?:[^ \t:]{1,120}:\d{1,6} (?:\([^() \t]{1,80}\) )?)?\Z"
)
_LEFT_OF_INFO: Final = re.compile(rb"(?<!\S)\[(\d{1,4})\] \Z")
# The end of HOST:PID:TID [DEVICE], which no time stamp is.
_END_OF_PREFIX: Final = re.compile(
    rb"(?:\A|:)\d{1,10} \Z|\A\d{0,4}\] \Z|:\d{1,10} \[\d{1,4}\] \Z|[^\s>*+`'\"-]\Z"
)
_CLOCK: Final = re.compile(rb"(?:\A|[\sT\[(])\d\d:\d\d:\d\d \Z")
# Lines whose end is lost: the kind stands in front, then the bytes, then the kernel.
_CUT: Final = re.compile(
    rb"(?P<operation>[A-Za-z]{2,40})(?: \[(?P<kind>Symmetric|Copy Engine|Hierarchical CE)\])?:"
    rb"(?: (?P<size>\d{1,19}) Bytes(?: -> (?:Kernel (?P<kernel>\w{2,80})(?=\s)"
    rb"|Algo (?P<algorithm>[A-Za-z_]\w{1,30}) proto (?P<protocol>[A-Za-z]\w{1,20})(?=\s))?)?)?"
    rb"(?P<rest>[^:>]{0,80})\Z",
    re.DOTALL,
)
_ELLIPSIS: Final = re.compile(rb"(?:[.]{3}|\xe2\x80\xa6)[\])>]?\s*\Z")


class Headless(NamedTuple):
    """A message without HOST:PID:TID. device: "" where it is missing too. marked: as NCCL's."""

    device: bytes
    message: bytes
    warning: bool = False
    marked: bool = True


def headless(line: bytes) -> Headless | None:
    """The message of a line that lacks the prefix of its process; None if it may be a cut one."""
    mark = _MARK.search(line)
    if mark is None:
        return Headless(b"", _LEAD.sub(b"", line), marked=False)
    warning = mark[1] == b"WARN"
    before = line[max(0, mark.start() - _SEARCHED_BYTES) : mark.start()]
    left = (_LEFT if warning else _LEFT_OF_INFO).search(before)
    decoration = before[: left.start()] if left else before
    cut = _END_OF_PREFIX.search(decoration) and not _CLOCK.search(decoration)
    if cut or FRAGMENT.search(decoration):
        return None
    return Headless((left[1] if left else None) or b"", line[mark.end() :], warning)


def pasted(message: bytes, *, marked: bool) -> Stated | None:
    """What a message states that was pasted, with its end or without."""
    stated = fact(message) or _cut(message.rstrip(b"`'\" \r"), marked)
    return stated if stated is not None and stated[0].operation in COLLECTIVES else None


def _cut(message: bytes, marked: bool) -> Stated | None:
    """As far as a line tells that ends too early; of `AllGather: ...` not even which line it is."""
    match = _CUT.match(message)
    if match is None:
        return None
    size, kind = match["size"], match["kind"]
    if not _ELLIPSIS.search(match["rest"]) and (size is None or not (marked or kind)):
        return None
    named = (2, 24, 3) if match["algorithm"] else OLDEST
    chosen = (match["algorithm"] or b"").upper(), (match["protocol"] or b"").upper()
    named_kind = (kind or b"").decode().lower().replace(" ", "_")  # as hierarchical_ce
    choice = Choice(
        cast("Kind", named_kind) if kind else None if size is None else "regular",
        match["operation"].decode(),
        0 if size is None else min(int(size), _LARGEST_BYTES),
        (match["kernel"] or b" ".join(filter(None, chosen))).decode(),
        Versions((2, 27, 3) if kind == b"Symmetric" else named),
        bytes_are="unknown" if size is None else "per_rank",
    )
    return choice, None


def may_be_cut(choice: Choice) -> bool:
    """Whether the operation is the end of another one's name, as `Reduce` is of `AllReduce`."""
    own = choice.operation or ""
    return any(name != own and name.endswith(own) for name in COLLECTIVES)


STATE_KINDS: Final = frozenset(LINES["changes"])
"""Lines that change what later lines of the process mean; all others describe it as a whole."""
SAID: Final[dict[str, str]] = LINES["said"]
"""Kinds that say something of the process and decide no verdict by themselves, in words."""
_EVENTS: Final = tuple(
    (kind, _pattern(text))
    for kind, texts in (LINES["changes"] | LINES["describes"]).items()
    for text in texts
)
_UNUSED_STARTS: Final = tuple(LINES["unused"])
_COUNTS: Final = re.compile(LINES["counts"])


def is_unused(message: str) -> bool:
    """Whether the message is a known one without evidence."""
    stripped = message.lstrip()
    return stripped.startswith(_UNUSED_STARTS) or _COUNTS.match(stripped) is not None


def state_of(message: str, *, warning: bool) -> tuple[str, tuple[str | None, ...]] | None:
    """Kind and fields of a line about the state of its process.

    A refusal is a warning, and no other change of state is.
    """
    for kind, pattern in _EVENTS:
        match = pattern.match(message)
        if match and (kind not in STATE_KINDS or warning == (kind == "window_refused")):
            return kind, match.groups()
    return None
