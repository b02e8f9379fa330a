"""What to do, what ran, where, from which code, and what else a reader takes away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.derive.summary import broken_promise
from bench.record import RunRecord
from bench.spec import ResolvedRun
from reports.compare.parity import wire_verdicts
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Facts, Paragraph, Section
from reports.sections.nccl import proofs
from reports.sections.recommendation import fastest_so_far, recommendation
from reports.sections.switches import switch_sentences
from reports.views.machine import (
    busiest_start,
    describe_code,
    describe_hardware,
    describe_software,
    distinct,
    registration_shortfalls,
)

_MOST_COMMITS = 2


def what_ran(findings: Findings) -> Section:
    """The first section: one recommendation, facts, then other findings in words."""
    records = [run.record for cell in findings.cells for run in cell.runs]
    blocks: list[Block] = recommendation(findings).blocks
    descriptions = [sweep.description for sweep in findings.sweeps if sweep.description]
    blocks.extend(Paragraph(text) for text in descriptions)
    blocks.append(Facts(_facts(findings, records)))
    mixed = _mixed_code(records)
    if mixed:
        text = (
            f"The cells of {', '.join(mixed)} were measured with different versions of the code: "
            "differences between them may be differences of the code. Run the sweep again to have "
            "one version throughout."
        )
        blocks.append(Paragraph(text, tone="warning"))
    blocks.extend(Paragraph(text, tone="warning") for text in _broken_promises(findings))
    busy = busiest_start(records)
    if busy:
        blocks.append(Paragraph(busy, tone="warning"))
    blocks.extend(Paragraph(text, tone="warning") for text in registration_shortfalls(records))
    blocks.extend(Paragraph(text, tone="warning") for text in _unproved(findings))
    sentences = tuple(("", text) for text in _sentences(findings))
    if sentences:
        blocks.append(Bullets(sentences))
    return Section("what-ran", "What ran", tuple(blocks))


def _facts(findings: Findings, records: Sequence[RunRecord]) -> tuple[tuple[str, str], ...]:
    pruned = sum(len(sweep.pruned) for sweep in findings.sweeps)
    with_arms = any(len(sweep.arms) > 1 for sweep in findings.sweeps)
    each = "arm of a cell" if with_arms else "cell"
    many = "arms of cells" if with_arms else "cells"
    finished = [cell for cell in findings.cells if cell.finished]
    timeless = len(finished) - len(findings.measured)
    measured = f"{len(finished)} of {quantity.counted(findings.planned, each, many)}"
    measured += f", {timeless} without a time" if timeless else ""
    facts = [
        ("Measured", measured + (f", {pruned} pruned" if pruned else "")),
        ("Runs per cell", _runs_per_cell(findings)),
    ]
    if records:
        facts += [
            ("Model and batch", distinct(_workload(record) for record in records)),
            ("Machine", distinct(describe_hardware(record) for record in records)),
            ("Ranks", ", ".join(map(str, sorted({r.resolved.launch.ranks for r in records})))),
            ("Software", distinct(describe_software(record) for record in records)),
            ("Commit", _commits(records)),
            ("Date (UTC)", _dates(records)),
        ]
    return tuple(facts)


def _runs_per_cell(findings: Findings) -> str:
    counts = sorted({cell.n for cell in findings.measured})
    if not counts:
        return "none"
    if counts == [1]:
        return "n=1, no interval"
    return "n=" + (f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}")


def _workload(record: RunRecord) -> str:
    resolved = record.resolved
    train = resolved.train
    return (
        f"{_model(resolved)}, "
        f"{train.global_batch} sequences x {train.seq_len} tokens, {resolved.data.kind} data, "
        f"{train.steps} steps"
    )


def _model(resolved: ResolvedRun) -> str:
    if resolved.shape is None:
        return resolved.model_text
    millions = resolved.shape.parameters / 1e6
    return f"{resolved.shape.preset} ({quantity.significant(millions, 3)} M parameters)"


def _dates(records: Sequence[RunRecord]) -> str:
    minutes = sorted(r.status.started_utc[:16].replace("T", " ") for r in records)
    known = [text for text in minutes if text]
    if not known:
        return "unknown"
    first, last = known[0], known[-1]
    if first == last:
        return first
    same_day = first[:10] == last[:10]
    return f"{first} to {last[11:] if same_day else last}"


def _commits(records: Sequence[RunRecord]) -> str:
    """The commit, or how many there were: a sweep may have been resumed over days."""
    ordered = sorted(records, key=lambda record: record.status.started_utc)
    states = list(dict.fromkeys(describe_code(record) for record in ordered))
    if len(states) <= _MOST_COMMITS:
        return "; ".join(states)
    return f"{len(states)} states, from {states[0]} to {states[-1]}"


def _mixed_code(records: Sequence[RunRecord]) -> list[str]:
    """Engines whose cells were not all measured with the same code."""
    codes: dict[str, set[str]] = {}
    for record in records:
        if record.status.arm is None:
            codes.setdefault(record.resolved.engine.name, set()).add(record.status.code)
    return [engine for engine, found in codes.items() if len(found) > 1]


def _sentences(findings: Findings) -> list[str]:
    sentences = []
    sentences.extend(fastest_so_far(findings))
    sentences.extend(_parity_sentences(findings))
    sentences.extend(switch_sentences(findings))
    if findings.flags:
        flagged = len({flag.cell for flag in findings.flags})
        sentences.append(
            f"Trade-offs that a bare speed would hide: {quantity.counted(flagged, 'cell')}; "
            "see Comparison."
        )
    failed = [c for c in findings.cells if any(r.kind in ("failed", "damaged") for r in c.runs)]
    if failed:
        sentences.append(
            f"Failed or damaged runs: {quantity.counted(len(failed), 'cell')}; see Not measured."
        )
    return sentences


def _broken_promises(findings: Findings) -> list[str]:
    """Cells that asked for low-precision gathers and have not shown them, by what they have."""
    return _by_text(
        (cell.name, str(text))
        for cell in findings.cells
        for text in {broken_promise(run.record) for run in cell.runs} - {None}
    )


def _unproved(findings: Findings) -> list[str]:
    """Cells that asked NCCL for kernels which no log shows, by what they asked for."""
    found = proofs(findings).items()
    return _by_text((name, text) for name, proof in found for text in proof.shortfalls)


def _by_text(found: Iterable[tuple[str, str]]) -> list[str]:
    """Each text once, behind the names of the cells that it is about."""
    cells: dict[str, list[str]] = {}
    for name, text in found:
        cells.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in cells.items()]


def _parity_sentences(findings: Findings) -> list[str]:
    compared = [row for group in findings.parity for row in group.compared]
    wires = [
        f"Gradients in other dtypes: {'; '.join(wire_verdicts(group))}." for group in findings.wires
    ]
    if not compared:
        return wires
    good = sum(row.verdict == "parity" for row in compared)
    text = (
        f"Loss parity: {good} of {quantity.counted(len(compared), 'compared cell')} within the "
        "bound of their dtype policy"
    )
    bad = [row.cell.name for row in compared if row.verdict != "parity"]
    return [text + (f"; not: {', '.join(bad)}." if bad else "."), *wires]
