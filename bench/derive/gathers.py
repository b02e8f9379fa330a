"""What a run gathered its weights in, against what it was asked for.

Engines have ignored such a request in silence: torchtitan issue 3123 tells of float8 gathers that
were asked for and travelled as bfloat16. The bytes on the wire tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.record import FINISHED_GOOD, RunRecord
from bench.spec import SHARDED

#: Dtypes of codes and scales, by torch's names.
_ONE_BYTE = ("uint8", "int8", "float8")
#: Vectors and scalars travel as they are, and are little beside matrices.
_LEAST_SHARE = 0.5


def gathered_bytes(record: RunRecord) -> dict[str, int] | None:
    """Bytes that rank 0 sent in gathers of weights, by dtype; None where nobody knows."""
    found = record.runtime.get("gathered_bytes")
    if not isinstance(found, Mapping):
        return None
    return {str(name): size for name, size in found.items() if isinstance(size, int)}


def broken_promise(record: RunRecord) -> str | None:
    """Why a run that asked for low-precision gathers has not shown them; None where it has.

    None also where it did not ask, where nothing is gathered, and for runs that did not finish.
    """
    run = record.resolved
    recipe = run.engine.asked("recipe") or "none"
    asked = recipe != "none" and run.engine.asked("gather_precision") == "recipe"
    if run.linear.quantised_weights:
        recipe, asked = f"{run.linear.kind} {run.linear.recipe}", True
    gathers = bool(SHARDED[run.strategy]) and run.data_parallel > run.engine.outer_size
    if not (asked and gathers) or record.status.state not in FINISHED_GOOD:
        return None
    found = gathered_bytes(record)
    if not found or not sum(found.values()):
        return f"asked for gathers of {recipe} weights; the record does not say what was gathered"
    total = sum(found.values())
    low = sum(size for name, size in found.items() if name.startswith(_ONE_BYTE))
    if low >= _LEAST_SHARE * total:
        return None
    others = ", ".join(
        f"{100 * size / total:.0f} % {name}"
        for name, size in sorted(found.items())
        if not name.startswith(_ONE_BYTE)
    )
    return f"asked for gathers of {recipe} weights and did not get them: {others} on the wire"
