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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from reports.nccl.model import COLLECTIVES, NEWEST, OLDEST, Choice, CollectiveCall, Kind, Versions

_WARN: Final = b" NCCL WARN "
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
        warning = line.startswith(_WARN, mark.start())
        window = line[max(last, mark.start() - _WINDOW_BYTES) : mark.start()][::-1]
        match = (_REVERSED_WARN if warning else _REVERSED_INFO).match(window)
        if match is None:
            continue
        device, tid, pid, host = (part[::-1] for part in match.groups())
        start = mark.start() - match.end()
        yield Header(host, pid, tid, device, start, mark.end(), warning)
        last = mark.end()


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
_OP = r"(?P<operation>[A-Za-z][A-Za-z0-9_]{1,40})"
_SIZE = r": (?P<size>\d{1,19}) Bytes -> "
_POINTER = r"(0x[0-9a-fA-F]{1,16}|\(nil\))"
_NUMERIC = (
    r"Algo (?P<algorithm>-?\d{1,3}) proto (?P<protocol>-?\d{1,3}) time -?\d+\.\d+(?:e[+-]?\d+)?"
)
_NAMED = r"Algo (?P<algorithm>[A-Za-z_]\w{1,30}) proto (?P<protocol>[A-Za-z]\w{1,20})"
_SYMMETRIC = _OP + r" \[Symmetric\]" + _SIZE + r"Kernel (?P<kernel>\w{2,80})"
# What a collector may append to a complete message. One that ends in a number is complete only
# if no word follows, which may be a piece of its next field.
_END = r"(?:\s*\Z|\s*[^\w\s.].*\Z)"

Form = tuple[Kind, Versions, re.Pattern[bytes]]


def _form(kind: Kind, versions: Versions, pattern: str, end: str = _END) -> Form:
    return kind, versions, re.compile((pattern + end).encode(), re.DOTALL)


_FORMS: Final = (
    _form(
        "regular",
        Versions((2, 24, 3), NEWEST),
        _OP + _SIZE + _NAMED + r" channel\{Lo\.\.Hi\}=\{-?\d+\.\.-?\d+\}",
        end=r".*\Z",
    ),
    _form(
        "symmetric",
        Versions((2, 27, 3), (2, 27, 7)),
        _SYMMETRIC + r" nchannels \d{1,6} nthreads \d{1,6}",
    ),
    _form(
        "symmetric",
        Versions((2, 28, 3), NEWEST),
        _SYMMETRIC + r" nchannels \d{1,6} nthreads \d{1,6} nWorks (?P<works>\d{1,6})",
    ),
    _form("regular", Versions((2, 23, 4), (2, 23, 4)), _OP + _SIZE + _NUMERIC),
    _form("regular", Versions((2, 20, 3), (2, 23, 4)), _SIZE.removeprefix(": ") + _NUMERIC),
    _form(
        "copy_engine",
        Versions((2, 29, 2), NEWEST),
        _OP + r" \[Copy Engine\]" + _SIZE + r"(?P<kernel>(?:cuda|hip)Memcpy\w*"
        r"(?:; CE synchronization with NVLS)?)(?:, numOps=\d+)?",
    ),
    _form(
        "hierarchical_ce",
        Versions((2, 30, 7), NEWEST),
        _OP + r" \[Hierarchical CE\]" + _SIZE + r"(?P<kernel>(?:Rail \S+ )?RMA proxy \+ CE)",
    ),
)


def tuning(message: bytes) -> Choice | None:
    """The choice that a TUNING line states; None if it is another line or an incomplete one."""
    for kind, versions, pattern in _FORMS:
        match = pattern.match(message)
        if match is None:
            continue
        found = {
            name: text.decode() for name, text in match.groupdict().items() if text is not None
        }
        size_bytes, works = int(found["size"]), found.get("works")
        if size_bytes > _LARGEST_BYTES or (works and int(works) == 0):
            return None
        return Choice(
            kind,
            found.get("operation"),
            size_bytes,
            found.get("kernel")
            or _name(ALGORITHMS, found["algorithm"]) + " " + _name(PROTOCOLS, found["protocol"]),
            versions,
            None if works is None else int(works),
            "total" if versions.all_before((2, 24, 3)) else "per_rank",
        )
    return None


def _name(table: tuple[str, ...], text: str) -> str:
    """`RING` of `Ring`, or of its number in the versions that print numbers."""
    if not text.lstrip("-").isdecimal():
        return text.upper()
    return table[int(text)] if 0 <= int(text) < len(table) else f"UNKNOWN({text})"


_MARK: Final = re.compile(rb"NCCL (INFO|WARN) ")
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
_CUT_KINDS: Final[dict[bytes, Kind]] = {
    b"Symmetric": "symmetric",
    b"Copy Engine": "copy_engine",
    b"Hierarchical CE": "hierarchical_ce",
}


@dataclass(frozen=True, slots=True)
class Headless:
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
    before = line[max(0, mark.start() - _WINDOW_BYTES) : mark.start()]
    left = _LEFT.search(before) if warning else _LEFT_OF_INFO.search(before)
    decoration = before[: left.start()] if left else before
    cut = _END_OF_PREFIX.search(decoration) and not _CLOCK.search(decoration)
    if cut or is_fragment(decoration):
        return None
    device = (left[1] if left else None) or b""
    return Headless(device, line[mark.end() :], warning)


def pasted(message: bytes, *, marked: bool) -> Choice | CollectiveCall | None:
    """What a message states that was pasted, with its end or without."""
    found = fact(message) or _cut(message.rstrip(b"`'\" \r"), marked)
    return found if found is not None and found.operation in COLLECTIVES else None


def _cut(message: bytes, marked: bool) -> Choice | None:
    """As far as a line tells that ends too early; of `AllGather: ...` not even which line it is."""
    match = _CUT.match(message)
    if match is None:
        return None
    size, kind = match["size"], match["kind"]
    if not _ELLIPSIS.search(match["rest"]) and (size is None or not (marked or kind)):
        return None
    named = (2, 24, 3) if match["algorithm"] else OLDEST
    versions = Versions((2, 27, 3) if kind == b"Symmetric" else named)
    chosen = (match["algorithm"] or b"").upper(), (match["protocol"] or b"").upper()
    return Choice(
        _CUT_KINDS[kind] if kind else None if size is None else "regular",
        match["operation"].decode(),
        0 if size is None else min(int(size), _LARGEST_BYTES),
        (match["kernel"] or b" ".join(filter(None, chosen))).decode(),
        versions,
        bytes_are="unknown" if size is None else "per_rank",
    )


def may_be_cut(choice: Choice) -> bool:
    """Whether the operation is the end of another one's name, as `Reduce` is of `AllReduce`."""
    own = choice.operation or ""
    return any(name != own and name.endswith(own) for name in COLLECTIVES)


_VARYING = rf": opCount [0-9a-f]{{1,16}} sendbuff {_POINTER} recvbuff {_POINTER} "
# What differs between repetitions of a COLL line: its counter and its buffers.
VARYING: Final = re.compile(_VARYING.encode())
_CALL: Final = re.compile(
    (
        f"{_OP}{_VARYING}count (\\d{{1,19}}) datatype (\\d{{1,3}}) op (\\d{{1,10}}) root -?\\d+"
        f" comm {_POINTER} \\[nranks=(\\d{{1,7}})\\] stream {_POINTER}" + _END
    ).encode(),
    re.DOTALL,
)


def fact(message: bytes) -> Choice | CollectiveCall | None:
    """What a TUNING or COLL line states; None if it is another line or an incomplete one."""
    if b" Bytes -> " in message:
        return tuning(message)
    return _call(message) if b": opCount " in message else None


def _call(message: bytes) -> CollectiveCall | None:
    match = _CALL.match(message)
    if match is None:
        return None
    operation, _, _, count, datatype, reduction, comm, ranks, _ = match.groups()
    return CollectiveCall(
        operation.decode(), int(count), int(datatype), int(reduction), comm.decode(), int(ranks)
    )


Patterns = tuple[tuple[str, re.Pattern[str]], ...]


def _events(*patterns: tuple[str, str]) -> Patterns:
    return tuple((kind, re.compile(pattern, re.DOTALL)) for kind, pattern in patterns)


_COMM = r"comm (0x[0-9a-fA-F]{1,16})"

# Lines that change what later lines of the process mean; order within the process matters.
STATE_EVENTS: Final = _events(
    (
        "init",
        r"(?:\[Rank \d+\] )?(?:\w+ )?"
        + _COMM
        # commId stands before the parent from 2.31 on, at the end before.
        + r" rank (\d+) nranks (\d+) cudaDev (-?\d+)(?: nvmlDev -?\d+)? busId \w+"
        r"(?=(?:.* commId (0x[0-9a-fA-F]+))?)(?: commId 0x[0-9a-fA-F]+)?"
        r"(?: parent (\S+))?(?: (?:splitCount|childCount) (\d+))?(?: color (-?\d+))?"
        r"(?: key -?\d+)?(?: commId 0x[0-9a-fA-F]+)? ?- Init (START|COMPLETE)",
    ),
    (
        "nodes",
        _COMM + r" rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+) localRank (\d+)"
        r" MNNVL (\d+)",
    ),
    ("destroy", _COMM + r" rank (\d+) nranks (\d+) cudaDev -?\d+ busId \w+ - (?:Destroy|Abort)"),
    ("register", r"register " + _COMM + r" buffer (0x[0-9a-fA-F]+) size (\d{1,19})(?!\d)"),
    ("not_supported", r"Symmetric memory is not supported\.(.*)"),
    ("not_supported", r"symmetricSupport 0(,.*)"),
    (
        "p2p",
        r"Check P2P Type (?:isAllDirectP2p|intraNodeP2pSupport) (\d) directMode (\d)"
        r"(?: isAllCudaP2p (\d))?",
    ),
)

# Lines that describe the process as a whole; each is kept once.
PROCESS_EVENTS: Final = _events(
    ("version", r"NCCL version (\d+\.\d+\.\d+)(?!\d)"),
    ("env", r"(NCCL_\w+) set by environment to (.*?)\.?\s*\Z"),
    ("env", r"Parsed environment variable (NCCL_\w+)=(.*?)\.?\s*\Z"),
    ("cta_policy", r"Comm config CTA policy flags set to (\d+)"),
    ("cta_policy", r"Comm config CTAPolicy reset to NCCL_CTA_POLICY=(\d+)"),
    ("window", r"Inserted window (\S+) into address map, ret=(-?\d+)"),
    ("window", r"(?:NVLS|IPC) symmetric alloc (?:mc )?buffer (.*)"),
    ("copy_engine_ready", r"Init CE, rank (\d+)"),
    ("nvls", r"NVLS multicast support is (available|not available) on dev (\d+)"),
    ("nvls_failed", r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory"),
    ("gin", r"(Assigned GIN plugin \S+|GIN/Plugin: Could not find: \S+)"),
    (
        "classic_registration",
        r"rank \d+ (?:successfully registered NVLS|reuse registered NVLS|failed to NVLS reg"
        r"|- IPC (?:registering|register|reuse)|- NET (?:register|reuse))",
    ),
    ("classic_registration", r"(?:COLLNET|NET) (?:register|reuse)|Skipping registration"),
)

# A warning that explains why a window is missing; it follows the registration that it is about.
REFUSALS: Final = _events(
    (
        "window_refused",
        r"(?:buffer \S+ .*does not satisfy symmetric registration requirements"
        r"|Window address must be suitably aligned"
        r"|Window registration of addresses that span multiple physical segments"
        r"|Allocation failed\. No suitable space found to accommodate)",
    ),
)

# Warnings about the process; each is kept once.
WARNINGS: Final = _events(
    ("unsupported", r"Communicator does not support symmetric memory"),
    ("no_kernel", r"Error: no symmetric kernel available for function (\S+)"),
    ("offsets", r"Coll (\S+) size (\d{1,19}) symmetric registration check failed"),
    ("shared_gpu", r"Multiple Ranks are using the same GPU"),
    ("mismatch", r"Mismatched NCCL (?:version|git versions) detected"),
)

_EVENTS: Final = (STATE_EVENTS, PROCESS_EVENTS, WARNINGS)
STATE_KINDS: Final = frozenset(kind for kind, _ in (*STATE_EVENTS, *REFUSALS))
# Kinds that say something of the process and decide no verdict by themselves.
SAID: Final = ("window_refused", "offsets", "shared_gpu", "mismatch", "nvls", "nvls_failed", "gin")

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
_COUNTS: Final = re.compile(r"\d+ coll channels|\S+:\d+ (?:\(\w+\) )?-> -?\d+")


def is_unused(message: str) -> bool:
    """Whether the message is a known one without evidence."""
    stripped = message.lstrip()
    return stripped.startswith(_UNUSED_STARTS) or _COUNTS.match(stripped) is not None


def event(message: str, *, warning: bool) -> tuple[str, tuple[str | None, ...]] | None:
    """Name and fields of the first line about the state of the process that the message is."""
    for table in (REFUSALS, WARNINGS, PROCESS_EVENTS) if warning else _EVENTS:
        for kind, pattern in table:
            match = pattern.match(message)
            if match is not None:
                return kind, match.groups()
    return None
