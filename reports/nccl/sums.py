"""In which dtype gradients that travel in 16 bits are added up. Pure.

Rings and trees of NCCL add up in the dtype that travels, so every hop rounds. Symmetric kernels add
up in FP32 and round once; what NVLS adds up in as a regular kernel is not said here. Whether they
can run depends on version, nodes and operation; whether they did, only a log tells.

    16 bits on the wire          one NVLink domain     several nodes
    reduce-scatter               from 2.27.3           from 2.29.7
    all-reduce                   from 2.27.3           never
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.spec import SHARDED, ResolvedRun
from reports.nccl.events import Version, exactly
from reports.nccl.reasons import FIRST_SYMMETRIC, MULTI_NODE_SCATTER
from reports.nccl.rows import Verdict, VerdictRow

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
    found = []
    for operation, axis, nodes in _reductions(resolved):
        summed, why = _judged(resolved, operation, nodes, None if known is None else known.low)
        if summed == "unknown":
            own = [row for row in rows if row.operation == operation]
            summed, why = _logged(own) or (summed, why)
        found.append(GradientSum(operation, axis, nodes, sent, summed, why))
    return found


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
    whole = not SHARDED[resolved.strategy]
    found = []
    if inner > 1:
        operation = "AllReduce" if whole else "ReduceScatter"
        found.append((operation, "inner", max(1, -(-spanned // on_a_node))))
    if engine.outer_size > 1:
        operation = "ReduceScatter" if SHARDED[engine.outer_strategy] else "AllReduce"
        found.append((operation, "outer", min(launch.nodes, engine.outer_size)))
    return found


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
        found = ".".join(map(str, version))
        return "as sent", f"NCCL {found} is older than {least}, the first with this kernel"
    return "unknown", "in FP32 where symmetric kernels ran, which a log tells"
