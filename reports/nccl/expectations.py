"""What a run requests of NCCL, and what the log of a run like it proves: kernels, not settings.

A setting that NCCL was given proves nothing: it falls back without a word. So each expectation
names the kernels that show it: symmetric ones, the copy engine, NVLS (NVLink SHARP, also inside of
symmetric kernels with multicast, `MC`), CollNet (SHARP of the network).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.spec import ResolvedRun
from reports.nccl.audit import Audit
from reports.nccl.rows import Verdict, VerdictRow, bytes_by_verdict

_WEIGHTS_AND_GRADIENTS = ("AllGather", "ReduceScatter")


@dataclass(frozen=True)
class Expectation:
    """What is requested, in words; the operations it is about; whether a row shows it."""

    text: str
    operations: tuple[str, ...]
    is_met: Callable[[VerdictRow], bool]


def expectations_of(resolved: ResolvedRun) -> list[Expectation]:
    """What a run asked for that NCCL may silently leave undone."""
    launch, setting = resolved.launch, resolved.engine.setting
    symmetric = bool(setting("nccl_ub") and setting("symmetric_registration"))
    found = []
    if launch.copy_engine:
        gathers = ("AllGather",)
        found.append(Expectation("copy-engine gathers", gathers, _by((Verdict.COPY_ENGINE,))))
    if symmetric:
        operations = tuple(
            o for o in _WEIGHTS_AND_GRADIENTS if not (launch.copy_engine and o == "AllGather")
        )
        # Symmetric windows are what the copy engine works on, and newer NCCL prefers it by itself.
        verdicts = (Verdict.SYMMETRIC, Verdict.COPY_ENGINE, Verdict.HIERARCHICAL_CE)
        if operations:
            found.append(Expectation("symmetric kernels", operations, _by(verdicts)))
    if launch.nvls == "on":
        found.append(Expectation("NVLS (NVLink SHARP)", _WEIGHTS_AND_GRADIENTS, _uses_nvls))
    if launch.collnet == "on":
        found.append(Expectation("CollNet (SHARP)", _WEIGHTS_AND_GRADIENTS, _uses_collnet))
    return found


def shortfalls(resolved: ResolvedRun, audit: Audit | None) -> list[str]:
    """A sentence for every expectation that the log does not prove; audit None: there is no log."""
    found = []
    for expected in expectations_of(resolved):
        if audit is None:
            found.append(
                f"asked for {expected.text}, and no log tells whether it got them: add a cell with "
                "measure.nccl: evidence"
            )
            continue
        rows = [row for row in steady_rows(audit) if row.operation in expected.operations]
        lacking = [row for row in rows if row.foreign_kernels or not expected.is_met(row)]
        silent = any(Verdict.NO_EVIDENCE in row.calls for row in rows)
        damaged = set(expected.operations) & audit.job.unread.damaged_until.keys()
        if not rows:
            operations = " or ".join(expected.operations)
            found.append(f"asked for {expected.text}, and the log has no line about {operations}")
        elif lacking:
            found.append(f"asked for {expected.text} and did not get them: {_named(lacking)}")
        elif silent or damaged:
            why = "calls without a line about their kernel"
            if damaged:
                why = f"damaged lines about {' and '.join(sorted(damaged))}"
            found.append(f"asked for {expected.text}, and the log does not prove it: {why}")
    return found


def verdict_text(audit: Audit) -> str:
    """Per operation, the share of bytes by verdict: `AllGather SYMMETRIC; AllReduce REGULAR`."""
    rows = steady_rows(audit)
    trains = (*_WEIGHTS_AND_GRADIENTS, "AllReduce")
    found = bytes_by_verdict(row for row in rows if row.operation in trains)
    texts = []
    for operation, own in sorted(found.items()):
        total = sum(own.values())
        if len(own) == 1 or not total:
            texts.append(f"{operation} {'/'.join(map(str, own))}")
        else:
            shares = (f"{100 * size / total:.0f} % {verdict}" for verdict, size in own.items())
            texts.append(f"{operation} {', '.join(shares)}")
    return "; ".join(texts) or "no line about a kernel"


def steady_rows(audit: Audit) -> list[VerdictRow]:
    """Rows behind a registration, where there was one, else all."""
    after = [row for row in audit.rows if row.phase == "after"]
    return after or list(audit.rows)


def _by(verdicts: tuple[Verdict, ...]) -> Callable[[VerdictRow], bool]:
    def is_met(row: VerdictRow) -> bool:
        return row.verdict in verdicts

    return is_met


def _uses_nvls(row: VerdictRow) -> bool:
    names = [name.upper() for name in row.kernels]
    multicast = row.verdict is Verdict.SYMMETRIC and all("MC" in n.split("_", 1)[-1] for n in names)
    return bool(names) and (multicast or all("NVLS" in name for name in names))


def _uses_collnet(row: VerdictRow) -> bool:
    return bool(row.kernels) and all("COLLNET" in name.upper() for name in row.kernels)


def _named(rows: list[VerdictRow]) -> str:
    """Each kind of shortfall once, with NCCL's reason where the log has one."""
    texts: dict[str, None] = {}
    for row in rows:
        kernels = f" ({', '.join(row.kernels[:2])})" if row.kernels else ""
        reason = f", {row.reason.text}" if row.reason is not None and row.reason.text else ""
        texts[f"{row.operation} {row.verdict}{kernels}{reason}"] = None
    return "; ".join(list(texts)[:3])
