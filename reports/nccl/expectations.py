"""What a run requests of NCCL, what the log of a run like it proves, and how gradients are summed.

A setting that NCCL was given proves nothing: it falls back without a word. So each expectation
names the kernels that show it: symmetric ones, the copy engine, NVLS (NVLink SHARP, also inside of
symmetric kernels with multicast, `MC`), CollNet (SHARP of the network).

Rings and trees of NCCL add up in the dtype that travels, so every hop rounds. Symmetric kernels add
up in FP32 and round once; what NVLS adds up in as a regular kernel is not said here. Whether they
can run depends on version, nodes and operation; whether they did, only a log tells.

    16 bits on the wire          one NVLink domain     several nodes
    reduce-scatter               from 2.27.3           from 2.29.7
    all-reduce                   from 2.27.3           never
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.spec import SHARDED, ResolvedRun
from reports.nccl.events import Version, exactly
from reports.nccl.reasons import FIRST_SYMMETRIC, MULTI_NODE_SCATTER
from reports.nccl.verdicts import Audit, Verdict, VerdictRow, bytes_by_verdict, channels_text
from reports.renderers.quantity import share

_WEIGHTS_AND_GRADIENTS = ("AllGather", "ReduceScatter")
# Symmetric windows are what the copy engine works on, and newer NCCL prefers it by itself.
_OF_WINDOWS = (Verdict.SYMMETRIC, Verdict.COPY_ENGINE, Verdict.HIERARCHICAL_CE)


@dataclass(frozen=True)
class Expectation:
    """What is requested, in words; the operations it is about; whether a row shows it."""

    text: str
    operations: tuple[str, ...]
    is_met: Callable[[VerdictRow], bool]


def expectations_of(resolved: ResolvedRun) -> list[Expectation]:
    """What a run requested that NCCL may silently leave undone."""
    launch, setting = resolved.launch, resolved.engine.setting
    symmetric = bool(setting("nccl_ub") and setting("symmetric_registration"))
    both, copied = _WEIGHTS_AND_GRADIENTS, launch.copy_engine
    return [
        Expectation(text, operations, is_met)
        for requested, text, operations, is_met in (
            (copied, "copy-engine gathers", both[:1], lambda r: r.verdict is Verdict.COPY_ENGINE),
            (symmetric, "symmetric kernels", both[copied:], lambda r: r.verdict in _OF_WINDOWS),
            (launch.nvls == "on", "NVLS (NVLink SHARP)", both, _uses_nvls),
            (launch.collnet == "on", "CollNet (SHARP)", both, lambda r: _all_named(r, "COLLNET")),
        )
        if requested
    ]


def shortfalls(resolved: ResolvedRun, audit: Audit | None) -> list[str]:
    """A sentence for every expectation that the log does not prove; audit None: there is no log."""
    sentences = []
    for expected in expectations_of(resolved):
        if audit is None:
            sentences.append(
                f"requested {expected.text}, and no log tells whether it got them: add a cell with "
                "measure.nccl: evidence"
            )
            continue
        rows = [row for row in steady_rows(audit) if row.operation in expected.operations]
        lacking = [row for row in rows if row.foreign_kernels or not expected.is_met(row)]
        silent = any(Verdict.NO_EVIDENCE in row.calls for row in rows)
        damaged = set(expected.operations) & audit.job.unread.damaged_until.keys()
        if not rows:
            operations = " or ".join(expected.operations)
            why = f"the log has no line about {operations}"
            sentences.append(f"requested {expected.text}, and {why}")
        elif lacking:
            sentences.append(f"requested {expected.text} and did not get them: {_named(lacking)}")
        elif silent or damaged:
            why = "calls without a line about their kernel"
            if damaged:
                why = f"damaged lines about {' and '.join(sorted(damaged))}"
            sentences.append(f"requested {expected.text}, and the log does not prove it: {why}")
    return sentences


def verdict_text(audit: Audit) -> str:
    """Per operation, the share of bytes by verdict: `AllGather SYMMETRIC on 4 channels`."""
    rows = steady_rows(audit)
    trains = (*_WEIGHTS_AND_GRADIENTS, "AllReduce")
    sizes = bytes_by_verdict(row for row in rows if row.operation in trains)
    texts = []
    for operation, own in sorted(sizes.items()):
        total = sum(own.values())
        kinds = {verdict: f"{verdict}{_channels(rows, operation, verdict)}" for verdict in own}
        if len(own) == 1 or not total:
            texts.append(f"{operation} {'/'.join(kinds.values())}")
        else:
            shares = (f"{share(size / total, 0)} {kinds[verdict]}" for verdict, size in own.items())
            texts.append(f"{operation} {', '.join(shares)}")
    return "; ".join(texts) or "no line about a kernel"


def _channels(rows: Sequence[VerdictRow], operation: str, verdict: Verdict) -> str:
    """Of the rows of this one kind of kernel."""
    shown = channels_text(r for r in rows if (r.operation, r.verdict) == (operation, verdict))
    return shown and f" on {shown} channels"


def steady_rows(audit: Audit) -> list[VerdictRow]:
    """Rows behind a registration, where there was one, else all."""
    after = [row for row in audit.rows if row.phase == "after"]
    return after or list(audit.rows)


def _uses_nvls(row: VerdictRow) -> bool:
    multicast = all("MC" in kernel.upper().split("_", 1)[-1] for kernel in row.kernels)
    symmetric = row.verdict is Verdict.SYMMETRIC and multicast and bool(row.kernels)
    return symmetric or _all_named(row, "NVLS")


def _all_named(row: VerdictRow, part: str) -> bool:
    return bool(row.kernels) and all(part in kernel.upper() for kernel in row.kernels)


def _named(rows: list[VerdictRow]) -> str:
    """Each kind of shortfall once, with NCCL's reason where the log has one."""
    texts: dict[str, None] = {}
    for row in rows:
        kernels = f" ({', '.join(row.kernels[:2])})" if row.kernels else ""
        reason = f", {row.reason.text}" if row.reason is not None and row.reason.text else ""
        texts[f"{row.operation} {row.verdict}{kernels}{reason}"] = None
    return "; ".join(list(texts)[:3])


_SHORT: Final = ("bf16", "fp16")
_IN_WORDS: Final = {"ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}

SumDtype = Literal["fp32", "as sent", "unknown"]


@dataclass(frozen=True)
class GradientSum:
    """One reduction of a run. operation: as NCCL calls it. axis: `inner` or `outer`.

    nodes: that its ranks are on. summed: in which dtype, as far as it is known. why: in words.
    """

    operation: str
    axis: str
    nodes: int
    sent: str
    summed: SumDtype
    why: str

    @property
    def text(self) -> str:
        """`reduce-scatter over 8 nodes`."""
        over = "one node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{_IN_WORDS[self.operation]} over {over}"


def gradient_sums(
    resolved: ResolvedRun, version: str | None = None, rows: Sequence[VerdictRow] = ()
) -> list[GradientSum]:
    """The reductions of a run on GPUs whose gradients travel in 16 bits; none of other runs.

    Args:
        resolved: the run, or a planned one.
        version: of NCCL, as `2.27.3`; None if unknown, as in a plan.
        rows: steady rows of its NCCL log; empty where there is none.
    """
    sent = resolved.dtypes.grad_comm
    if resolved.launch.device != "cuda" or sent not in _SHORT or resolved.data_parallel == 1:
        return []
    known = None if version is None else exactly(version)
    sums = []
    for operation, axis, nodes in _reductions(resolved):
        summed, why = _judged(resolved, operation, nodes, None if known is None else known.low)
        if summed == "unknown":
            own = [row for row in rows if row.operation == operation]
            summed, why = _logged(own) or (summed, why)
        sums.append(GradientSum(operation, axis, nodes, sent, summed, why))
    return sums


def _logged(rows: Sequence[VerdictRow]) -> tuple[SumDtype, str] | None:
    """What a log proves; None where it shows nothing, both kinds, or NVLS."""
    shown = {row.verdict for row in rows}
    if shown == {Verdict.SYMMETRIC}:
        return "fp32", "the log shows symmetric kernels alone"
    if shown == {Verdict.REGULAR} and not any("NVLS" in "".join(row.kernels) for row in rows):
        return "as sent", "the log shows regular kernels alone"
    return None


def _reductions(resolved: ResolvedRun) -> list[tuple[str, str, int]]:
    """(operation, axis, nodes): of gradients. Ranks of an inner group are neighbours."""
    engine, launch = resolved.engine, resolved.launch
    inner = resolved.data_parallel // engine.outer_size
    spanned = inner * engine.tensor_parallel
    on_a_node = max(1, launch.ranks // launch.nodes)
    unsharded = not SHARDED[resolved.strategy]
    reductions = []
    if inner > 1:
        operation = "AllReduce" if unsharded else "ReduceScatter"
        reductions.append((operation, "inner", max(1, -(-spanned // on_a_node))))
    if engine.outer_size > 1:
        operation = "ReduceScatter" if SHARDED[engine.outer_strategy] else "AllReduce"
        reductions.append((operation, "outer", min(launch.nodes, engine.outer_size)))
    return reductions


def _judged(
    resolved: ResolvedRun, operation: str, nodes: int, version: Version | None
) -> tuple[SumDtype, str]:
    setting, sent = resolved.engine.setting, resolved.dtypes.grad_comm
    if setting("transport") == "point_to_point":
        return "fp32", f"transport {setting('transport')} adds up in FP32"
    regular = f"rings and trees add up in {sent}"
    if not (setting("nccl_ub") and setting("symmetric_registration")):
        return "as sent", f"{regular}; symmetric ones need nccl_ub"
    if nodes > 1 and operation == "AllReduce":
        return "as sent", (
            f"NCCL has no symmetric {_IN_WORDS[operation]} over several nodes"
            " (unless they are one NVLink domain)"
        )
    needed = FIRST_SYMMETRIC if nodes == 1 else MULTI_NODE_SCATTER
    least = ".".join(map(str, needed))
    if version is None:
        return "unknown", f"in FP32 from NCCL {least} on, where symmetric kernels run"
    if version < needed:
        stated = ".".join(map(str, version))
        return "as sent", f"NCCL {stated} is older than {least}, the first with this kernel"
    return "unknown", "in FP32 where symmetric kernels ran, which a log tells"
