"""How to read the numbers: the formulas by name, next to the numbers they made."""

from __future__ import annotations

from bench.derive.flops import FORMULA, HYBRID_FORMULA
from bench.derive.metrics import LEDGER_PEAK, RSS
from bench.derive.peaks import TABLE_DATE
from bench.derive.steady import DRIFT_TOLERANCE, DROPPED_STEPS, METHOD, MIN_WINDOW_STEPS
from reports.comparisons.change import SPEED_THRESHOLD, threshold
from reports.findings import Findings
from reports.renderers.document import Bullets, Section


def method(_: Findings) -> Section:
    """Fixed text, with the constants that were in force."""
    items = (
        (
            "Steady state",
            f"the first {DROPPED_STEPS} steps never count; warm-up beyond them is cut by {METHOD}; "
            f"at least {MIN_WINDOW_STEPS} steps must remain, and a significant drift of the "
            f"rolling median above {100 * DRIFT_TOLERANCE:.0f} % means that no time is reported.",
        ),
        (
            "Replication",
            "n counts runs, not steps: steps of one run share its conditions. With n=1 there is no "
            "interval; three runs against three can never be significant.",
        ),
        (
            "TFLOP/s",
            f"formula {FORMULA}: model FLOPs with causal attention, without what recompute "
            "repeats. Other formulas give other values at equal speed: torchtitan's reads 12.5 % "
            f"higher for an 8B model at 8192 tokens. Hybrids: {HYBRID_FORMULA}, in which a token "
            "counts the experts that it visits, and the state-space scan its recurrence.",
        ),
        (
            "MFU",
            f"achieved TFLOP/s over the dense peak of the exact device (table of {TABLE_DATE}); "
            "unknown devices and CPUs have none, and a value above 100 % is withheld as invalid.",
        ),
        (
            "Bytes sent",
            "by the ring convention: gather and scatter (n-1)/n of the full buffer, all-reduce "
            "twice that; summed over ranks, per step.",
        ),
        (
            "Memory ledger",
            "what the engine knows of its own tensors. The copies of weights that autocast makes "
            "(ddp and single, where they compute in another dtype than they store) are in no "
            "ledger; the allocator's peak of a memory profile has them.",
        ),
        (
            "Trade-offs",
            f"flagged from {100 * SPEED_THRESHOLD:.0f} % of throughput and "
            f"{100 * threshold(LEDGER_PEAK):.1f} % of allocator or ledger memory "
            f"({100 * threshold(RSS):.0f} % of a resident set).",
        ),
    )
    return Section("method", "How to read the numbers", (Bullets(items),))
