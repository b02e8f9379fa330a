"""How to read the numbers (the formulas by name), and how to make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from bench.derive.flops import FORMULA, HYBRID_FORMULA
from bench.derive.metrics import LEDGER_PEAK, RSS
from bench.derive.peaks import TABLE_DATE
from bench.derive.steady import DRIFT_TOLERANCE, DROPPED_STEPS, METHOD, MIN_WINDOW_STEPS
from bench.record import RunRecord
from reports.compare.change import SPEED_THRESHOLD, threshold
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Code, Facts, warning
from reports.views.machine import describe_code, distinct, entries


def method(_: Findings) -> Iterator[Block]:
    """Fixed text, with the constants that were in force."""
    items = (
        (
            "Steady state",
            f"the first {DROPPED_STEPS} steps never count; warm-up beyond them is cut by {METHOD}; "
            f"at least {MIN_WINDOW_STEPS} steps must remain, and a significant drift of the "
            f"rolling median above {quantity.share(DRIFT_TOLERANCE, 0)} means "
            "that no time is reported.",
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
            f"flagged from {quantity.share(SPEED_THRESHOLD, 0)} of throughput and "
            f"{quantity.share(threshold(LEDGER_PEAK))} of allocator or ledger memory "
            f"({quantity.share(threshold(RSS), 0)} of a resident set).",
        ),
    )
    yield Bullets(items)


_MOST_COMMANDS = 5


def reproduce(findings: Findings) -> Iterator[Block]:
    """Nothing where no run left a record."""
    runs = [run.record for cell in findings.cells for run in cell.runs]
    records = sorted(runs, key=lambda record: record.status.started_utc)
    if not records:
        return
    sources = [sweep.source for sweep in findings.sweeps if sweep.source]
    yield Facts(
        (
            ("Commit", distinct(map(describe_code, records))),
            ("Sweep file", ", ".join(sources) or "not recorded"),
            ("CPU governor", distinct(map(_governors, records))),
            ("CPU affinity", distinct(map(_affinity, records))),
        )
    )
    if any(entries(record.environment, "git").get("dirty") for record in records):
        yield warning(
            "Files were changed on top of the commit: the commit alone does not repeat this."
        )
    commands = list(dict.fromkeys(filter(None, map(_command, records))))
    lines = commands[:_MOST_COMMANDS] or ["(the command was not recorded)"]
    if (more := len(commands) - _MOST_COMMANDS) > 0:
        lines.append(f"# and {quantity.counted(more, 'more command')}: see Appendix")
    yield Code("\n".join(lines))


def _command(record: RunRecord) -> str:
    """What was typed, behind the environment variables that were set by hand; "" if not known."""
    argv = [str(word) for word in record.environment.get("argv") or ()]
    if not argv:
        return ""
    settings = [
        f"{name}={shlex.quote(str(value))}"
        for name, value in entries(record.environment, "variables").items()
        if not name.startswith("SLURM_")  # of the job, set by nobody's hand
    ]
    return " ".join([*settings, shlex.join([PurePath(argv[0]).name, *argv[1:]])])


def _governors(record: RunRecord) -> str:
    governors = record.environment.get("cpu_governors")
    return ", ".join(map(str, governors)) if governors else "not known"


def _affinity(record: RunRecord) -> str:
    """`all 16 cores`, or which of them."""
    allowed, cores = (record.environment.get(key) for key in ("cpu_affinity", "cpu_count"))
    if not isinstance(allowed, list):
        return "not known"
    if len(allowed) == cores:
        return f"all {cores} cores"
    return f"cores {', '.join(map(str, allowed))} of {cores}"
