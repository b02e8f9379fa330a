"""The reasons why a collective was not symmetric: to add or change one, start at CONDITIONS.

Each condition for a symmetric kernel says of some calls whether it holds, is proved to have failed
(with the line that proves it), or is open, and then which subsystem of NCCL_DEBUG_SUBSYS would
settle it. A condition is failed only if it failed for every call and for every version that the log
leaves possible. The reason is the first condition that the log proves to have failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from reports.nccl.calls import UNKNOWN_OPERATION, CallEvidence
from reports.nccl.events import (
    DATATYPES,
    REDUCTIONS,
    Choice,
    CollectiveCall,
    StateChange,
    Version,
    Versions,
)
from reports.nccl.timeline import Process

FIRST_SYMMETRIC: Final[Version] = (2, 27, 3)
BATCHED: Final[Version] = (2, 28, 3)
MULTI_NODE_GATHER: Final[Version] = (2, 29, 2)
MULTI_NODE_SCATTER: Final[Version] = (2, 29, 7)
AVERAGE: Final[Version] = (2, 30, 3)
_CUDA_P2P: Final = Versions((2, 28, 7), (2, 28, 9))
_MOST_BYTES: Final = 64 << 30
_AVERAGE: Final = 4
_SYMMETRIC_OPERATIONS: Final = ("AllGather", "AllReduce", "ReduceScatter")
_FLOATS: Final = frozenset(
    i for i, (name, _) in enumerate(DATATYPES) if "float" in name and name != "float64"
)
# In the log of a version line; no subsystem is needed for it.
VERSION: Final = "version"


_ORDER: Final = ("INIT", "ENV", "COLL", "REG", "ALLOC", "TUNING")


@dataclass(frozen=True)
class Reason:
    """condition: its name, "" where none is proved to have failed. quote: the line that proves it.

    candidates: what may be the reason, where nothing is proved. missing: subsystems that would
    settle it; a condition that names any is open.
    """

    condition: str
    text: str
    quote: str = ""
    candidates: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def settled_by(self) -> str:
        """The setting that would settle the question, "" if nothing is missing."""
        if not self.missing:
            return ""
        wanted = [name for name in _ORDER if name in self.missing or name == "TUNING"]
        return f"NCCL_DEBUG_SUBSYS={','.join(wanted)}"


Condition = Callable[[CallEvidence], Reason | None]
"""None where it holds."""


def _failed(text: str, quote: str = "") -> Reason:
    return Reason("", text, quote)


def _open(text: str, *needs: str) -> Reason:
    return Reason("", text, missing=needs)


def version(case: CallEvidence) -> Reason | None:
    """Symmetric kernels exist since 2.27.3."""
    if case.versions.all_before(FIRST_SYMMETRIC):
        return _failed(
            f"NCCL {case.versions} has no symmetric kernels; 2.27.3 is the first version with them",
            case.version_line,
        )
    if case.versions.all_from(FIRST_SYMMETRIC) or case.job.symmetric_seen:
        return None
    return _open("the version is not known", VERSION)


def switches(case: CallEvidence) -> Reason | None:
    """Windows and cuMem can be switched off; so could user registration in 2.27."""
    names = ["NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"]
    if case.versions.all_before(BATCHED):
        names.append("NCCL_LOCAL_REGISTER")
    for name in names:
        event = case.setting(name)
        if event is not None and event.values[1] == "0":
            return _failed(f"{name}=0 switches symmetric memory off", event.text)
    if case.job.symmetric_seen or case.about("env") or case.subsystem_on("ENV"):
        return None
    return _open("a variable may switch symmetric memory off", "ENV")


def topology(case: CallEvidence) -> Reason | None:
    """One NVLink domain; later versions cross nodes for some operations."""
    for view in case.views:
        if (said := view.said.get("not_supported")) is not None:
            return _failed("NCCL says that this communicator has no symmetric memory", said.text)
    warning = case.about("unsupported")
    if warning is not None and len(case.views) <= 1:
        return _failed("a window was refused: no symmetric memory", warning.text)
    known = case.nodes_view
    if known is None or known.nodes is None:
        if len(case.job.hosts) == 1:
            return None  # as far as the log shows; `_one_host` says so
        return _open("the communicator may span nodes", "INIT")
    if known.nodes > 1:
        return _across_nodes(case, known.nodes, known.said["nodes"].text)
    return _connectivity(case)


def _across_nodes(case: CallEvidence, nodes: int, line: str) -> Reason | None:
    operation = case.key.operation
    if operation == "AllReduce":
        return _failed(
            f"the communicator spans {nodes} nodes, and no version has a symmetric AllReduce that"
            " does",
            line,
        )
    first = MULTI_NODE_SCATTER if operation == "ReduceScatter" else MULTI_NODE_GATHER
    if case.versions.all_before(first):
        since = ".".join(map(str, first))
        return _failed(
            f"the communicator spans {nodes} nodes; symmetric {operation} crosses nodes since"
            f" {since}, this is {case.versions}",
            line,
        )
    switch = case.setting("NCCL_SYM_GIN_KERNELS_ENABLE")
    if switch is not None and switch.values[1] == "0":
        return _failed(
            f"the communicator spans {nodes} nodes and kernels over the network are switched off",
            switch.text,
        )
    if not case.versions.all_from(first):
        return _open(
            f"the communicator spans {nodes} nodes, which not every version allows", VERSION
        )
    return None


def _connectivity(case: CallEvidence) -> Reason | None:
    for view in case.views:
        if (said := view.said.get("p2p")) is None:
            continue
        direct, _, cuda = said.values
        all_cuda = case.versions.all_in(_CUDA_P2P)
        if all_cuda and cuda is not None:
            direct = cuda
        if direct == "0" and (not all_cuda or cuda is not None):
            return _failed("the GPUs are not all connected directly", said.text)
    return None


def operation(case: CallEvidence) -> Reason | None:
    """Only three operations have symmetric kernels."""
    name = case.key.operation
    if name == UNKNOWN_OPERATION:
        return _open("the version prints no operation", "COLL")
    if name not in _SYMMETRIC_OPERATIONS:
        return _failed(f"{name} has no symmetric kernel in any version", case.line)
    return None


def reduction(case: CallEvidence) -> Reason | None:
    """Reductions are symmetric for sums; averages since 2.30.3."""
    if case.key.operation == "AllGather":
        return None
    if not case.calls:
        return _open(
            "the reduction may be an average (before 2.30.3), a scaled sum, or no sum at all",
            "COLL",
        )
    outcomes = [_reduction_of(call, case) for call in sorted(case.calls, key=str)]
    return _if_all_failed(outcomes)


def _reduction_of(call: CollectiveCall, case: CallEvidence) -> Reason | None:
    if call.reduction == 0:
        return None
    if call.reduction == _AVERAGE:
        if case.versions.all_before(AVERAGE):
            return _failed(
                f"the reduction is an average, which is symmetric since 2.30.3; this is"
                f" {case.versions}",
                case.call_line,
            )
        if case.versions.all_from(AVERAGE):
            return None
        return _open("the reduction is an average, which is symmetric since 2.30.3", VERSION)
    if call.reduction < len(REDUCTIONS):
        name = REDUCTIONS[call.reduction]
        return _failed(f"the reduction is {name}; only sums are symmetric", case.call_line)
    return _failed(
        f"the reduction is user defined (op {call.reduction}, a pre-multiplied sum), which is never"
        " symmetric",
        case.call_line,
    )


def datatype(case: CallEvidence) -> Reason | None:
    """Reductions are symmetric for float32, float16, bfloat16 and float8."""
    if case.key.operation == "AllGather":
        return None
    if not case.calls:
        return _open("the data type may be an integer or float64", "COLL")
    outcomes = [
        None
        if call.datatype in _FLOATS or call.datatype >= len(DATATYPES)
        else _failed(
            f"the data type is {DATATYPES[call.datatype][0]}; reductions are symmetric for float32,"
            " float16, bfloat16 and float8",
            case.call_line,
        )
        for call in sorted(case.calls, key=str)
    ]
    return _if_all_failed(outcomes)


def _if_all_failed(outcomes: list[Reason | None]) -> Reason | None:
    if all(reason is not None and not reason.missing for reason in outcomes):
        return outcomes[0]
    return next((reason for reason in outcomes if reason and reason.missing), None)


def registration(case: CallEvidence) -> Reason | None:
    """The buffers must lie in a window of this communicator."""
    if (refusal := _refusal(case)) is not None:
        return refusal
    if case.key.phase == "before":
        return _failed(
            "nothing is registered on this communicator yet: its first registration comes later"
            if case.key.attributed
            else "nothing is registered in this process yet: its first registration comes later",
            case.registration_line,
        )
    if not case.key.attributed:
        return _open("a buffer may lie outside the registered memory", "COLL", "REG")
    if case.key.phase == "":
        if not case.registration_line and not case.subsystem_on("REG"):
            needs = ("REG",) if case.calls else ("COLL", "REG")
            return _open("the buffers may not be registered on this communicator", *needs)
        return _failed(
            "no registration is seen on this communicator, although registrations are printed",
            case.registration_line or case.call_line,
        )
    return _in_range(case)


def _refusal(case: CallEvidence) -> Reason | None:
    """What NCCL itself warned of, about these calls or their communicator."""
    for event in case.events("offsets"):
        operation, size_bytes = event.values
        if operation == case.key.operation:
            if size_bytes == str(case.key.size_bytes):
                return _failed("NCCL found buffers that ranks registered unlike", event.text)
            return _open(f"ranks may have registered the buffers unlike: {event.text}", "REG")
    for view in case.views:
        said = view.said.get("window_refused")
        if said is not None and (not view.ranges or (case.outside and all(case.outside))):
            return _failed("a window was refused on this communicator", said.text)
    said = case.about("window_refused")
    if said is not None and not case.key.attributed:
        return _open(f"a window was refused, for no named communicator: {said.text}", "COLL", "REG")
    return None


def _in_range(case: CallEvidence) -> Reason | None:
    outside = case.outside
    if not case.calls or not outside:
        return _open("a buffer may lie outside the registered memory", "COLL")
    if all(outside):
        return _failed(
            f"buffer {outside[0]} is in no range registered on this communicator",
            case.call_line,
        )
    if case.about("window") or "symmetric" in case.made.by_key[case.key]:
        return None
    return _open(
        "the registration may be a plain one rather than a symmetric window, which print the same"
        " line",
        "ALLOC",
    )


def grouping(case: CallEvidence) -> Reason | None:
    """2.27 uses symmetric kernels for calls that stand alone."""
    if case.versions.all_from(BATCHED) or case.versions.all_before(FIRST_SYMMETRIC):
        return None
    if case.versions.all_before(BATCHED):
        if case.grouped and case.grouped >= case.lines.total():
            return _failed(
                "the call was grouped with others of its communicator, and 2.27 takes symmetric"
                " kernels only for a call that stands alone",
                case.grouped_quote,
            )
        if case.calls:
            return None
    elif case.calls and not case.grouped:
        return None
    return _open("several calls may be grouped, which 2.27 does not launch symmetrically", "COLL")


def size(case: CallEvidence) -> Reason | None:
    """64 GiB over all ranks and more is too much for every symmetric kernel."""
    ranks = next((view.ranks for view in case.views if view.ranks), None)
    if ranks is None or case.key.bytes_are != "per_rank":
        return None
    total = case.key.size_bytes * ranks
    if total < _MOST_BYTES:
        return None
    return _failed(f"{ranks} ranks x {case.key.size_bytes:,} bytes is 64 GiB or more", case.line)


def override(case: CallEvidence) -> Reason | None:
    """One kernel can be forced, which excludes the others."""
    warnings = (e for e in case.events("no_kernel") if case.key.operation in (e.values[0] or ""))
    if (warning := next(warnings, None)) is not None:
        return _failed("NCCL found no symmetric kernel", warning.text)
    event = case.setting("NCCL_SYM_KERNEL")
    name = "" if event is None else event.values[1] or ""
    if event is None or not name or name.startswith(case.key.operation + "_"):
        return None
    return _failed(f"NCCL_SYM_KERNEL={name} allows this kernel alone", event.text)


CONDITIONS: Final[tuple[tuple[str, Condition], ...]] = (
    ("version", version),
    ("switched off", switches),
    ("spans nodes", topology),
    ("operation", operation),
    ("reduction", reduction),
    ("data type", datatype),
    ("registration", registration),
    ("grouped", grouping),
    ("size", size),
    ("override", override),
)


_SMALL_QUIRK: Final = Versions((2, 29, 2), (2, 29, 3))
_SILENT_COPY_ENGINE: Final = Versions((2, 28, 3), (2, 28, 9))
_COPY_ENGINE_BYTES: Final = 8 << 20
_FIRST_WITH_LINES: Final = (2, 20, 3)


def why_not_symmetric(case: CallEvidence) -> Reason:
    """The reason for calls of one kind that is not symmetric, or for calls without a line."""
    if case.kind is None:
        return _cut_off(case) if case.line else _no_evidence(case)
    if case.kind == "copy_engine":
        return _copy_engine(case)
    if case.kind == "hierarchical_ce":
        return Reason(
            "copy engine",
            "the copy engine and the network proxy take precedence across nodes; the memory is"
            " registered",
            case.line,
        )
    return _regular(case)


def _regular(case: CallEvidence) -> Reason:
    reason = _not_symmetric(case)
    if case.key.operation in COPIED and copy_engine_policy(case) is not None:
        return replace(reason, text=f"{reason.text}; the copy engine was requested and not taken")
    return reason


def _not_symmetric(case: CallEvidence) -> Reason:
    unmet = [(name, reason) for name, check in CONDITIONS if (reason := check(case)) is not None]
    for name, reason in unmet:
        if not reason.missing:
            return replace(reason, condition=name)
    if unmet:
        needs = {need for _, reason in unmet for need in reason.missing}
        text = "not settled by this log"
        if VERSION in needs:
            text += "; the version is not known (NCCL prints it at every NCCL_DEBUG level)"
        one_host = _one_host(case)
        return Reason(
            "",
            text + one_host,
            case.line,
            tuple(dict.fromkeys(reason.text for _, reason in unmet)),
            tuple(name for name in _ORDER if name in needs),
        )
    chosen = " and ".join(case.kernels) or "a regular kernel"
    text = f"eligible as far as the log shows; NCCL still chose {chosen}"
    if case.versions.all_in(_SMALL_QUIRK):
        text += " (2.29.2 and 2.29.3 fall back for small messages even if they are registered)"
    return Reason("", text, case.line)


def _one_host(case: CallEvidence) -> str:
    if case.nodes_view is not None or len(case.job.hosts) != 1:
        return ""
    return f"; nodes are not the reason, as all lines come from host {next(iter(case.job.hosts))}"


COPIED: Final = frozenset({"AllGather", "AlltoAll", "Gather", "Scatter"})
"""Operations that the copy engine can do."""


def copy_engine_policy(case: CallEvidence | Process) -> StateChange | None:
    """The line that asks for it."""
    named = (e for e in case.events("env") if e.values[0] == "NCCL_CTA_POLICY")
    policy = next(chain(case.events("cta_policy"), named), None)
    requested = policy is not None and (policy.values[-1] or "").upper() in ("2", "3", "ZERO")
    return policy if requested else None


def _copy_engine(case: CallEvidence) -> Reason:
    text = "the copy engine takes precedence; the memory is registered"
    if (policy := copy_engine_policy(case)) is not None:
        return Reason("copy engine", f"{text} (CTA policy ZERO)", policy.text)
    if case.key.operation == "AllGather" and case.key.size_bytes > _COPY_ENGINE_BYTES:
        text += " (by default on Blackwell for more than 8 MiB per rank, NCCL_SYM_CE_THRESHOLD)"
    return Reason("copy engine", text, case.line)


def _no_evidence(case: CallEvidence) -> Reason:
    """Why no TUNING line tells about these calls; that is never a verdict."""
    quote = case.call_line
    if case.versions.all_before(_FIRST_WITH_LINES):
        return Reason(
            "version",
            f"NCCL {case.versions} prints no line about the kernel; 2.20.3 is the first that does",
            case.version_line or quote,
        )
    ready = case.about("copy_engine_ready")
    if ready is not None and case.versions.all_in(_SILENT_COPY_ENGINE):
        return Reason(
            "",
            "2.28 prints no line for a call on the copy engine, which was initialised here; whether"
            " this call used it cannot be seen",
            ready.text,
        )
    if case.views and all(view.rank not in (None, 0) for view in case.views):
        ranks = ", ".join(str(view.rank) for view in case.views[:4])
        return Reason(
            "",
            "only rank 0 of the communicator prints the kernel, and the logs hold rank"
            f" {ranks} alone: add the log of its rank 0",
            quote,
        )
    if not _tuning_seen(case):
        return Reason("", "no TUNING line in this process", quote, missing=("TUNING",))
    if any(view.rank is None for view in case.views):
        return Reason(
            "",
            "only rank 0 of a communicator prints the kernel, and which rank this process has is"
            " not known",
            quote,
            missing=("INIT",),
        )
    return Reason("", "calls were made, and no line tells which kernel ran", quote)


def _cut_off(case: CallEvidence) -> Reason:
    text = "the line is cut: without ` Bytes -> ` it may be that of a call or of a kernel"
    return Reason("", text, case.line)


def _tuning_seen(case: CallEvidence) -> bool:
    return case.subsystem_on("TUNING") or any(
        isinstance(fact, Choice) for process in case.processes for fact in process.facts()
    )
