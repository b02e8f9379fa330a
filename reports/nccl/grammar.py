"""The messages of NCCL that carry evidence, by version: one table per subsystem.

A message is what follows `NCCL INFO ` or `NCCL WARN `. The forms were read in the sources of the
release tags 2.19 to 2.30.7; NCCL documents none of them, so whatever does not match completely is
counted and shown, never guessed at.

Finding NCCL's own prefix in a line that launchers, collectors and terminals have decorated.

    [TS]HOST:PID:TID [DEV] NCCL INFO MESSAGE
    [TS]HOST:PID:TID [DEV] FILE:LINE (FUNC) NCCL WARN MESSAGE

Time stamps can be any text, so the prefix is never anchored at the start of the line. It is found
by its literal middle and then read backwards, which takes time proportional to its length whatever
the line holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from reports.nccl.model import NEWEST, Call, Choice, Kind, Versions

INFO: Final = b" NCCL INFO "
WARN: Final = b" NCCL WARN "
_MARKS: Final = re.compile(rb" NCCL (?:INFO|WARN) ")
_WINDOW_BYTES: Final = 400

# Read backwards from the end of the prefix: `]3[ 845:123:tsoh`.
_REVERSED_INFO: Final = re.compile(
    rb"\](\d{1,4}-?)\[ (\d{1,10}):(\d{1,10}):([A-Za-z0-9._-]{1,255})"
)
_REVERSED_WARN: Final = re.compile(
    rb"(?:\)[^() \t]{1,80}\( )?\d{1,6}:[^ \t:]{1,120} \](\d{1,4}-?)\[ (\d{1,10}):(\d{1,10}):"
    rb"([A-Za-z0-9._-]{1,255})"
)
_ESCAPES: Final = re.compile(rb"(?:\x1b|\xef\xbf\xbd|\xc2\x9b)\[[0-9;?]{0,16}[A-Za-z]")
# Some log drivers write these characters so inside JSON strings.
_JSON_ESCAPES: Final = (
    (b"\\u003e", b">"),
    (b"\\u003c", b"<"),
    (b"\\u0026", b"&"),
    (b"\\u001b", b"\x1b"),
)
_REPEATED: Final = re.compile(rb"[ \t]*\[repeated (\d{1,9})x across cluster\].*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Header:
    """Where NCCL's prefix starts and its message begins (offsets into the line)."""

    host: bytes
    pid: bytes
    tid: bytes
    device: bytes
    start: int
    message: int
    warning: bool


# Pieces of NCCL's own messages: where they stand before a prefix, the line was cut and glued.
_FRAGMENT: Final = re.compile(
    rb"Bytes|Algo |proto |channel\{|Kernel |nthreads|nchannels|nWorks|opCount|sendbuff|recvbuff"
    rb"|datatype|comm 0x|NCCL |stream 0x|\[nranks=|\[Symmetric\]|\[Copy Engine\]|register "
    rb"|(?:All|Reduce|Broadcast|Send|Recv)\w*: |\{\d+\.\."
)


def is_fragment(text: bytes) -> bool:
    """Whether text before a prefix is part of a message rather than a decoration."""
    return _FRAGMENT.search(text) is not None


def clean_header(line: bytes, mark: int) -> Header | None:
    """The prefix that ends at `mark`, the offset of INFO, if only decoration precedes it."""
    match = _REVERSED_INFO.match(line[max(0, mark - _WINDOW_BYTES) : mark][::-1])
    if match is None or mark > _WINDOW_BYTES:
        return None
    start = mark - match.end()
    if start and (line.find(b"\x1b", 0, start) >= 0 or is_fragment(line[:start])):
        return None
    device, tid, pid, host = (part[::-1] for part in match.groups())
    return Header(host, pid, tid, device, start, mark + len(INFO), warning=False)


def plain(line: bytes) -> bytes:
    """`line` without terminal colours and without a carriage return at its end."""
    if b"\\u00" in line:
        for escape, byte in _JSON_ESCAPES:
            line = line.replace(escape, byte)
    if b"\x1b" in line or b"\xef\xbf\xbd" in line or b"\xc2\x9b" in line:
        line = _ESCAPES.sub(b"", line)
    return line.rstrip(b"\r\n")


def without_repetition(message: bytes) -> tuple[bytes, int]:
    """The message without Ray's note that it stood for several lines, and how many those were."""
    if b" across cluster]" not in message:
        return message, 0
    match = _REPEATED.search(message)
    if match is None:
        return message, 0
    return message[: match.start()], int(match.group(1))


def headers(line: bytes) -> Iterator[Header]:
    """Every prefix in the line, first to last; more than one means that lines were glued."""
    last = 0
    for mark in _MARKS.finditer(line):
        warning = line.startswith(WARN, mark.start())
        window = line[max(last, mark.start() - _WINDOW_BYTES) : mark.start()][::-1]
        match = (_REVERSED_WARN if warning else _REVERSED_INFO).match(window)
        if match is None:
            continue
        device, tid, pid, host = (part[::-1] for part in match.groups())
        start = mark.start() - match.end()
        yield Header(host, pid, tid, device, start, mark.end(), warning)
        last = mark.end()


def unescaped(message: bytes) -> bytes | None:
    """The message inside a JSON string or quotes (docker and Kubernetes log files), if it is one.

    NCCL prints no double quote and no backslash in the messages that carry evidence.
    """
    cut = min((i for i in (message.find(b"\\n"), message.find(b'"')) if i >= 0), default=-1)
    return message[:cut] if cut > 0 else None


NUMERIC_VERSIONS: Final = Versions((2, 20, 3), (2, 23, 4))
NAMED_VERSIONS: Final = Versions((2, 24, 3), NEWEST)
EVERY_RANK_VERSIONS: Final = Versions((2, 27, 3), (2, 27, 7))
BATCHED_VERSIONS: Final = Versions((2, 28, 3), NEWEST)
COPY_ENGINE_VERSIONS: Final = Versions((2, 29, 2), NEWEST)
HIERARCHICAL_VERSIONS: Final = Versions((2, 30, 7), NEWEST)

ALGORITHMS: Final = (
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
)
PROTOCOLS: Final = ("LL", "LL128", "SIMPLE")

_LARGEST_BYTES: Final = 2**62
_OP = r"([A-Za-z][A-Za-z0-9_]{1,40})"
_SIZE = r"(\d{1,19}) Bytes -> "
_POINTER = r"(0x[0-9a-fA-F]{1,16}|\(nil\))"
# What a collector may append to a complete message. One that ends in a number is complete only
# if no word follows, which may be a piece of its next field.
_END = r"(?:\s*\Z|\s*[^\w\s.].*\Z)"


def _tuning(pattern: str, end: str = _END) -> re.Pattern[bytes]:
    return re.compile((pattern + end).encode(), re.DOTALL)


_NAMED = _tuning(
    _OP
    + ": "
    + _SIZE
    + r"Algo ([A-Za-z_]\w{1,30}) proto ([A-Za-z]\w{1,20}) channel\{Lo\.\.Hi\}=\{-?\d+\.\.-?\d+\}",
    end=r".*\Z",
)
_NUMERIC = _tuning(
    f"(?:{_OP}: )?" + _SIZE + r"Algo (-?\d{1,3}) proto (-?\d{1,3}) time -?\d+\.\d+(?:e[+-]?\d+)?"
)
_SYMMETRIC = _tuning(
    _OP
    + r" \[Symmetric\]: "
    + _SIZE
    + r"Kernel (\w{2,80}) nchannels \d{1,6} nthreads \d{1,6}(?: nWorks (\d{1,6}))?"
)
_COPY_ENGINE = _tuning(
    _OP
    + r" \[Copy Engine\]: "
    + _SIZE
    + r"((?:cuda|hip)Memcpy\w*(?:; CE synchronization with NVLS)?)(?:, numOps=\d+)?"
)
_HIERARCHICAL = _tuning(
    _OP + r" \[Hierarchical CE\]: " + _SIZE + r"((?:Rail \S+ )?RMA proxy \+ CE)"
)


def _name(table: tuple[str, ...], index: int) -> str:
    return table[index] if 0 <= index < len(table) else f"UNKNOWN({index})"


def _text(match: re.Match[bytes], group: int) -> str:
    return match.group(group).decode("ascii", "replace")


def _named(match: re.Match[bytes]) -> Choice:
    return Choice(
        "regular",
        _text(match, 1),
        int(match.group(2)),
        algorithm=_text(match, 3).upper(),
        protocol=_text(match, 4).upper(),
        versions=NAMED_VERSIONS,
    )


def _numeric(match: re.Match[bytes]) -> Choice:
    return Choice(
        "regular",
        None if match.group(1) is None else _text(match, 1),
        int(match.group(2)),
        bytes_are="total",
        algorithm=_name(ALGORITHMS, int(match.group(3))),
        protocol=_name(PROTOCOLS, int(match.group(4))),
        versions=NUMERIC_VERSIONS
        if match.group(1) is None
        else Versions((2, 23, 4), NUMERIC_VERSIONS.high),
    )


def _symmetric(match: re.Match[bytes]) -> Choice:
    works = match.group(4)
    return Choice(
        "symmetric",
        _text(match, 1),
        int(match.group(2)),
        kernel=_text(match, 3),
        works=None if works is None else int(works),
        versions=EVERY_RANK_VERSIONS if works is None else BATCHED_VERSIONS,
    )


def _engine(kind: Kind, versions: Versions) -> Callable[[re.Match[bytes]], Choice]:
    def build(match: re.Match[bytes]) -> Choice:
        size_bytes = int(match.group(2))
        return Choice(kind, _text(match, 1), size_bytes, kernel=_text(match, 3), versions=versions)

    return build


_TUNING: Final = (
    (_NAMED, _named),
    (_SYMMETRIC, _symmetric),
    (_NUMERIC, _numeric),
    (_COPY_ENGINE, _engine("copy_engine", COPY_ENGINE_VERSIONS)),
    (_HIERARCHICAL, _engine("hierarchical_ce", HIERARCHICAL_VERSIONS)),
)


def tuning(message: bytes) -> Choice | None:
    """The choice that a TUNING line states; None if it is another line or an incomplete one."""
    if b" Bytes -> " not in message:
        return None
    for pattern, build in _TUNING:
        match = pattern.match(message)
        if match is not None:
            choice = build(match)
            return choice if choice.size_bytes <= _LARGEST_BYTES and choice.works != 0 else None
    return None


# The tail of a COLL line behind its operation and `opCount`.
CALL_TAIL: Final = re.compile(
    (
        f"sendbuff {_POINTER} recvbuff {_POINTER} count (\\d{{1,19}}) datatype (\\d{{1,3}})"
        f" op (\\d{{1,10}}) root -?\\d+ comm {_POINTER} \\[nranks=(\\d{{1,7}})\\]"
        f" stream {_POINTER}" + _END
    ).encode(),
    re.DOTALL,
)
_CALL_NAME: Final = re.compile(_OP.encode() + rb"\Z")


def call(operation: bytes, tail: bytes) -> tuple[Call, tuple[bytes, bytes]] | None:
    """The call behind `Operation: opCount N `, and its buffers; None if the line is incomplete."""
    match = CALL_TAIL.match(tail)
    if match is None or _CALL_NAME.match(operation) is None:
        return None
    send, receive, count, datatype, reduction, comm, ranks, _stream = match.groups()
    found = Call(
        operation.decode(),
        int(count),
        int(datatype),
        int(reduction),
        comm.decode(),
        int(ranks),
    )
    return found, (send, receive)


def _event(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_COMM = r"comm (0x[0-9a-fA-F]{1,16})"

# Lines that change what later lines of the process mean; order within the process matters.
STATE_EVENTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "init",
        _event(
            r"(?:\[Rank \d+\] )?(?:\w+ )?"
            + _COMM
            # commId stands before the parent from 2.31 on, at the end before.
            + r" rank (\d+) nranks (\d+) cudaDev (-?\d+)(?: nvmlDev -?\d+)? busId \w+"
            r"(?=(?:.* commId (0x[0-9a-fA-F]+))?)(?: commId 0x[0-9a-fA-F]+)?"
            r"(?: parent (\S+))?(?: (?:splitCount|childCount) (\d+))?(?: color (-?\d+))?"
            r"(?: key -?\d+)?(?: commId 0x[0-9a-fA-F]+)? ?- Init (START|COMPLETE)"
        ),
    ),
    (
        "nodes",
        _event(
            _COMM + r" rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+) localRank (\d+)"
            r" MNNVL (\d+)"
        ),
    ),
    (
        "destroy",
        _event(_COMM + r" rank (\d+) nranks (\d+) cudaDev -?\d+ busId \w+ - (?:Destroy|Abort)"),
    ),
    (
        "register",
        _event(r"register " + _COMM + r" buffer (0x[0-9a-fA-F]+) size (\d{1,19})(?!\d)"),
    ),
    ("not_supported", _event(r"Symmetric memory is not supported\.(.*)")),
    ("not_supported", _event(r"symmetricSupport 0(,.*)")),
    (
        "p2p",
        _event(
            r"Check P2P Type (?:isAllDirectP2p|intraNodeP2pSupport) (\d) directMode (\d)"
            r"(?: isAllCudaP2p (\d))?"
        ),
    ),
)

# Lines that describe the process as a whole; each is kept once.
STANDING_EVENTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("version", _event(r"NCCL version (\d+\.\d+\.\d+)(?!\d)")),
    ("env", _event(r"(NCCL_\w+) set by environment to (.*?)\.?\s*\Z")),
    ("env", _event(r"Parsed environment variable (NCCL_\w+)=(.*?)\.?\s*\Z")),
    ("cta_policy", _event(r"Comm config CTA policy flags set to (\d+)")),
    ("cta_policy", _event(r"Comm config CTAPolicy reset to NCCL_CTA_POLICY=(\d+)")),
    ("window", _event(r"Inserted window (\S+) into address map, ret=(-?\d+)")),
    ("window", _event(r"(?:NVLS|IPC) symmetric alloc (?:mc )?buffer (.*)")),
    ("copy_engine_ready", _event(r"Init CE, rank (\d+)")),
    ("nvls", _event(r"NVLS multicast support is (available|not available) on dev (\d+)")),
    ("nvls_failed", _event(r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory")),
    ("gin", _event(r"(Assigned GIN plugin \S+|GIN/Plugin: Could not find: \S+)")),
    (
        "classic_registration",
        _event(
            r"rank \d+ (?:successfully registered NVLS|reuse registered NVLS|failed to NVLS reg"
            r"|- IPC (?:registering|register|reuse)|- NET (?:register|reuse))"
        ),
    ),
    ("classic_registration", _event(r"(?:COLLNET|NET) (?:register|reuse)|Skipping registration")),
)

# Warnings that explain why a window is missing; each is kept once per process.
WARNINGS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "window_refused",
        _event(
            r"buffer \S+ .*does not satisfy symmetric registration requirements"
            r"|Window address must be suitably aligned"
            r"|Window registration of addresses that span multiple physical segments"
            r"|Allocation failed\. No suitable space found to accommodate"
        ),
    ),
    ("unsupported", _event(r"Communicator does not support symmetric memory")),
    ("no_kernel", _event(r"Error: no symmetric kernel available for function (\S+)")),
    ("offsets", _event(r"Coll (\S+) size \d+ symmetric registration check failed")),
    ("shared_gpu", _event(r"Multiple Ranks are using the same GPU")),
    ("mismatch", _event(r"Mismatched NCCL (?:version|git versions) detected")),
)

# Beginnings of messages that are well known and carry no evidence.
_UNUSED_STARTS: Final = tuple(
    """Channel,Trees,Tree ,Ring ,Rings,Connected,Using ,NET,Bootstrap,BOOTSTRAP,P2P,SHM,NVLS,MNNVL,
    GIN,DMA-BUF,PROFILER,TUNER,Plugin,RAS,Setting affinity,Init timings,Init START,NCCL git,
    threadThresholds,cudaDriverVersion,Enabled NCCL,Launch mode,Symmetric VA,Binding multicast,
    Allocated,Intra,Pattern,GPU,CPU,NVLink,=,Topology,Failed to open libibverbs,Assigned NET,
    Initialized NET,Successfully loaded external,No Device,CC Off,CollNet,COLLNET,Comm config,
    MAX_,Max NThreads,Algorithm,Protocol,AllReduce |,AllGather |,ReduceScatter |,Broadcast |,
    Reduce |,ReduceScatter_RailA2A,DL Cuda,Cuda ,Loading,NCCL_,Cross-clique,LSA extended,
    Check P2P,Memory,Mem ,comm 0x,ncclComm,Rank,rank,TIME,Trace,Threads,MSCCL,RCCL,rocm,Hipify,
    ROCm,Dmabuf,transport,[Proxy,New proxy,Proxy,proxy,Received,Sent,Closing,Ipc,IPC,Kernel,
    Socket,socket,isAll,Skipping""".replace("\n", "")
    .replace("    ", "")
    .split(",")
)
# Of those, the ones that a large job prints by the million and that no event begins with.
BULK_STARTS: Final = tuple(
    b"Channel ,Trees [,Tree ,Ring ,Connected ,Using ,threadThresholds,Setting affinity,NET/".split(
        b","
    )
)
_COUNTS: Final = re.compile(r"\d+ coll channels|\S+:\d+ (?:\(\w+\) )?-> -?\d+")


def is_unused(message: str) -> bool:
    """Whether the message is a known one without evidence."""
    stripped = message.lstrip()
    return stripped.startswith(_UNUSED_STARTS) or _COUNTS.match(stripped) is not None


def find_event(
    message: str, table: tuple[tuple[str, re.Pattern[str]], ...]
) -> tuple[str, tuple[str | None, ...]] | None:
    """Name and fields of the first pattern of `table` that the message begins with."""
    for kind, pattern in table:
        match = pattern.match(message)
        if match is not None:
            return kind, match.groups()
    return None
