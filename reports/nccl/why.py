"""Why a collective was not symmetric: the first condition that the log proves to have failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from reports.nccl.conditions import CONDITIONS, VERSION
from reports.nccl.evidence import Evidence
from reports.nccl.version import Versions

_ORDER: Final = ("INIT", "ENV", "COLL", "REG", "ALLOC", "TUNING")
_SMALL_QUIRK: Final = Versions((2, 29, 2), (2, 29, 3))
_SILENT_COPY_ENGINE: Final = Versions((2, 28, 3), (2, 28, 9))
_COPY_ENGINE_BYTES: Final = 8 << 20
_FIRST_WITH_LINES: Final = (2, 20, 3)
_BASE: Final = ("TUNING",)


@dataclass(frozen=True)
class Reason:
    """condition: its name, "" where none is proved to have failed. quote: the line that proves it.

    candidates: what may be the reason, where nothing is proved. missing: subsystems that would
    settle it.
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
        wanted = [name for name in _ORDER if name in self.missing or name in _BASE]
        return f"NCCL_DEBUG_SUBSYS={','.join(wanted)}"


def why_not_symmetric(case: Evidence) -> Reason:
    """The reason for calls of one kind that is not symmetric, or for calls without a line."""
    if case.kind is None:
        return _no_evidence(case)
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


def _regular(case: Evidence) -> Reason:
    outcomes = [(name, check(case)) for name, check in CONDITIONS]
    for name, outcome in outcomes:
        if outcome.state == "failed":
            return Reason(name, outcome.text, outcome.quote)
    opens = [outcome for _, outcome in outcomes if outcome.state == "open"]
    if opens:
        needs = {need for outcome in opens for need in outcome.needs}
        text = "not settled by this log"
        if VERSION in needs:
            text += "; the version is not known (NCCL prints it at every NCCL_DEBUG level)"
        one_host = _one_host(case)
        return Reason(
            "",
            text + one_host,
            case.line,
            tuple(dict.fromkeys(outcome.text for outcome in opens)),
            tuple(name for name in _ORDER if name in needs),
        )
    text = f"eligible as far as the log shows; NCCL still chose {_chosen(case)}"
    if case.versions.meet(_SMALL_QUIRK) == case.versions:
        text += " (2.29.2 and 2.29.3 fall back for small messages even if they are registered)"
    return Reason("", text, case.line)


def _one_host(case: Evidence) -> str:
    if case.nodes_view is not None or len(case.job.hosts) != 1:
        return ""
    return f"; nodes are not the reason, as all lines come from host {next(iter(case.job.hosts))}"


def _chosen(case: Evidence) -> str:
    names = [what for (kind, what) in case.cell.kernels if kind == case.kind]
    return " and ".join(dict.fromkeys(names)) or "another kernel"


def _copy_engine(case: Evidence) -> Reason:
    text = "the copy engine takes precedence; the memory is registered"
    policy = next(case.standing("cta_policy"), None) or case.setting("NCCL_CTA_POLICY")
    if policy is not None and (policy.values[-1] or "").upper() in ("2", "ZERO"):
        return Reason("copy engine", f"{text} (CTA policy ZERO)", policy.text)
    if case.key.operation == "AllGather" and case.key.size_bytes > _COPY_ENGINE_BYTES:
        text += " (by default on Blackwell for more than 8 MiB per rank, NCCL_SYM_CE_THRESHOLD)"
    return Reason("copy engine", text, case.line)


def _no_evidence(case: Evidence) -> Reason:
    """Why no TUNING line tells about these calls; that is never a verdict."""
    quote = case.call_line
    if case.versions.all_before(_FIRST_WITH_LINES):
        return Reason(
            "version",
            f"NCCL {case.versions} prints no line about the kernel; 2.20.3 is the first that does",
            case.version_line or quote,
        )
    ready = next(case.standing("copy_engine_ready"), None)
    if ready is not None and case.versions.meet(_SILENT_COPY_ENGINE) == case.versions:
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


def _tuning_seen(case: Evidence) -> bool:
    if any(case.subsystem_on(name) for name in ("TUNING",)):
        return True
    for process in case.processes:
        for item in process.timeline.items:
            if isinstance(item, dict) and any(o.choice is not None for o in item):
                return True
    return False
