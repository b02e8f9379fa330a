"""What ran, where, from which code, and what else a reader takes away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bench.derive.summary import broken_promise
from bench.record import RunRecord
from reports.compare.parity import wire_verdicts
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Facts, Paragraph, warning
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


def what_ran(findings: Findings) -> list[Block]:
    """The first section: one recommendation, facts, then other findings in words."""
    records = [run.record for cell in findings.cells for run in cell.runs]
    blocks = recommendation(findings)
    blocks += [Paragraph(sweep.description) for sweep in findings.sweeps if sweep.description]
    blocks.append(Facts(tuple(_facts(findings, records))))
    blocks += map(warning, _warnings(findings, records))
    sentences = tuple(("", text) for text in _sentences(findings))
    return [*blocks, Bullets(sentences)] if sentences else blocks


def _facts(findings: Findings, records: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    with_arms = any(len(sweep.arms) > 1 for sweep in findings.sweeps)
    nouns = ("arm of a cell", "arms of cells") if with_arms else ("cell", "cells")
    timeless = len(findings.without_a_time)
    pruned = sum(len(sweep.pruned) for sweep in findings.sweeps)
    measured = f"{len(findings.finished)} of {quantity.counted(findings.planned, *nouns)}"
    measured += f", {timeless} without a time" if timeless else ""
    yield "Measured", measured + (f", {pruned} pruned" if pruned else "")
    runs = sorted({cell.n for cell in findings.measured})
    n = f"n={runs[0]}" + (f" to {runs[-1]}" if len(runs) > 1 else "") if runs else "none"
    yield "Runs per cell", "n=1, no interval" if runs == [1] else n
    if records:
        yield "Model and batch", distinct(map(_workload, records))
        yield "Machine", distinct(map(describe_hardware, records))
        yield "Ranks", ", ".join(map(str, sorted({r.resolved.launch.ranks for r in records})))
        yield "Software", distinct(map(describe_software, records))
        yield "Commit", _commits(records)
        yield "Date (UTC)", _dates(records)


def _workload(record: RunRecord) -> str:
    resolved = record.resolved
    train, shape, model = resolved.train, resolved.shape, resolved.model_text
    if shape is not None:
        millions = quantity.significant(shape.parameters / 1e6, 3)
        model = f"{shape.preset} ({millions} M parameters)"
    return (
        f"{model}, {train.global_batch} sequences x {train.seq_len} tokens, "
        f"{resolved.data.kind} data, {train.steps} steps"
    )


def _dates(records: Sequence[RunRecord]) -> str:
    minutes = sorted(r.status.started_utc[:16].replace("T", " ") for r in records)
    known = [text for text in minutes if text] or ["unknown"]
    first, last = known[0], known[-1]
    end = last[11:] if first[:10] == last[:10] else last
    return first if first == last else f"{first} to {end}"


def _commits(records: Sequence[RunRecord]) -> str:
    """The commit, or how many there were: a sweep may have been resumed over days."""
    ordered = sorted(records, key=lambda record: record.status.started_utc)
    states = list(dict.fromkeys(describe_code(record) for record in ordered))
    if len(states) <= _MOST_COMMITS:
        return "; ".join(states)
    return f"{len(states)} states, from {states[0]} to {states[-1]}"


def _warnings(findings: Findings, records: Sequence[RunRecord]) -> Iterator[str]:
    codes: dict[str, set[str]] = {}
    for record in records:
        if record.status.arm is None:
            codes.setdefault(record.resolved.engine.name, set()).add(record.status.code)
    if mixed := [engine for engine, versions in codes.items() if len(versions) > 1]:
        yield (
            f"The cells of {', '.join(mixed)} were measured with different versions of the code: "
            "differences between them may be differences of the code. Run the sweep again to have "
            "one version throughout."
        )
    # Low-precision gathers that were requested and are not shown.
    broken = ((c.name, {broken_promise(run.record) for run in c.runs}) for c in findings.cells)
    yield from _by_text((name, text) for name, texts in broken for text in texts if text)
    if busy := busiest_start(records):
        yield busy
    yield from registration_shortfalls(records)
    # Kernels that were requested of NCCL and that no log shows.
    proved = proofs(findings).items()
    yield from _by_text((name, text) for name, proof in proved for text in proof.shortfalls)


def _by_text(named_texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each text once, behind the names of the cells that it is about."""
    cells: dict[str, list[str]] = {}
    for name, text in named_texts:
        cells.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in cells.items()]


def _sentences(findings: Findings) -> Iterator[str]:
    yield from fastest_so_far(findings)
    if compared := [row for group in findings.parity for row in group.compared]:
        bad = [row.cell.name for row in compared if row.verdict != "parity"]
        many = quantity.counted(len(compared), "compared cell")
        text = f"{len(compared) - len(bad)} of {many} within the bound of their dtype policy"
        yield f"Loss parity: {text}" + (f"; not: {', '.join(bad)}." if bad else ".")
    for group in findings.wires:
        yield f"Gradients in other dtypes: {'; '.join(wire_verdicts(group))}."
    yield from switch_sentences(findings)
    if flagged := len({flag.cell for flag in findings.flags}):
        cells = quantity.counted(flagged, "cell")
        yield f"Trade-offs that a bare speed would hide: {cells}; see Comparison."
    lost = [c for c in findings.cells if any(r.kind in ("failed", "damaged") for r in c.runs)]
    if lost:
        yield f"Failed or damaged runs: {quantity.counted(len(lost), 'cell')}; see Not measured."
