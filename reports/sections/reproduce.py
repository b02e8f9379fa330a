"""How to run it again: commit, sweep file, commands, settings of the machine that matter.

Machine and software stand in the first section.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import PurePath

from bench.record import RunRecord
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Code, Facts, Paragraph, Section
from reports.views.machine import describe_code, distinct, entries

_MOST_COMMANDS = 5


def reproduce(findings: Findings) -> Section | None:
    """None where no run left a record."""
    records = sorted(
        (run.record for cell in findings.cells for run in cell.runs),
        key=lambda record: record.status.started_utc,
    )
    if not records:
        return None
    sources = [sweep.source for sweep in findings.sweeps if sweep.source]
    facts = [
        ("Commit", distinct(describe_code(record) for record in records)),
        ("Sweep file", ", ".join(sources) or "not recorded"),
        ("CPU governor", distinct(map(_governors, records))),
        ("CPU affinity", distinct(map(_affinity, records))),
    ]
    blocks: list[Block] = [Facts(tuple(facts))]
    if any(entries(record.environment, "git").get("dirty") for record in records):
        text = "Files were changed on top of the commit: the commit alone does not repeat this."
        blocks.append(Paragraph(text, tone="warning"))
    blocks.append(Code("\n".join(_commands(records))))
    return Section("reproduce", "Reproduce", tuple(blocks))


def _commands(records: Iterable[RunRecord]) -> list[str]:
    """What was typed, in order of time, behind the environment variables that were set by hand."""
    known: dict[str, None] = {}
    for record in records:
        argv = [str(word) for word in record.environment.get("argv") or ()]
        if argv:
            command = [PurePath(argv[0]).name, *argv[1:]]
            variables = entries(record.environment, "variables")
            settings = [
                f"{name}={shlex.quote(str(value))}"
                for name, value in variables.items()
                if not name.startswith("SLURM_")  # of the job, set by nobody's hand
            ]
            known[" ".join([*settings, shlex.join(command)])] = None
    lines = list(known) or ["(the command was not recorded)"]
    more = len(lines) - _MOST_COMMANDS
    hidden = quantity.counted(more, "more command")
    return lines[:_MOST_COMMANDS] + ([f"# and {hidden}: see Appendix"] if more > 0 else [])


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
