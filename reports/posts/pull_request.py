"""The block of a pull request: advice, changes, lines, doubts and commands, below sixty lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import NamedTuple

from bench.derive.metrics import (
    ALLOCATOR_PEAK,
    GRAD_NORM,
    LEDGER_PEAK,
    LIVE_STORAGE,
    LOSS,
    RSS,
    STEP_TIME,
    TFLOPS,
    Metric,
)
from bench.errors import NothingMeasuredError
from bench.store import ResultsStore
from bench.workload import ImportedRun, ImportedStep, Workload
from reports.compare.change import less_one
from reports.compare.logs import beside
from reports.compare.logs import of_import as log_of_import
from reports.compare.parity import wire_verdicts
from reports.compare.text import interval_text
from reports.findings import Findings, find
from reports.nccl import events
from reports.posts.pairs import changes, pairs
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Code, Heading, Paragraph, folded_blocks
from reports.renderers.printable import printable
from reports.renderers.render import render
from reports.renderers.table import Table
from reports.sections.nccl import proofs
from reports.sections.recommendation import recommendation
from reports.views.cells import Cell
from reports.views.machine import entries
from reports.views.sweep_view import load_sweeps

MOST_LINES = 59
_TITLES: tuple[str, ...] = (
    *("run", "<against", "time", "interval", "throughput", "ratio", "memory", "<memory metric"),
    *("live storage", "loss", "grad norm", "<runs"),
)
_MOST_ROWS = 10
_MOST_REASONS = 3
_MOST_DOUBTS = 5
_MOST_COMMANDS = 3
_MOST_KERNELS = 4
_SENTENCE = 220


@dataclass
class _Contents:
    """rows: texts below `_TITLES`, head against base. doubts: trade-offs and unlike things.

    advice: the report's recommendation.
    """

    advice: list[Block] = field(default_factory=list)
    entries: list[PostEntry] = field(default_factory=list)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    parity: list[str] = field(default_factory=list)


def pull_request(store: ResultsStore, names: Sequence[str]) -> str:
    """Markdown for GitHub on the named sweeps and imports, all if none is; the rest is counted.

    Raises:
        UsageError: a name that is neither.
        NothingMeasuredError: no run has finished, and none was imported.
    """
    known = store.imports.ids()
    imported = [store.imports.read(name) for name in (names or known) if name in known]
    sweeps = [name for name in names if name not in known] if names else store.sweeps()
    if not names:
        # As they stand in their text.
        imported.sort(key=lambda run: (run.provenance.source, run.provenance.lines or (0, 0)))
    stems = dict.fromkeys(run.id.partition(".")[0] for run in imported)
    if len(stems) == 1:
        imported = [replace(run, id=run.id.partition(".")[2] or run.id) for run in imported]
    contents = _Contents()
    _add_imported(contents, imported)
    if sweeps:
        _add_measured(contents, find(store, load_sweeps(store, sweeps)))
    if not contents.entries:
        raise NothingMeasuredError(f"{store.root} holds no finished and no imported run")
    blocks: list[Block] = [Heading(", ".join([*sweeps, *stems])), *_comparisons(contents)]
    commands = list(dict.fromkeys(entry.reproduce for entry in contents.entries))
    tail: list[Block] = [Paragraph("Reproduce", "lead"), Code("\n".join(commands[:_MOST_COMMANDS]))]
    room = MOST_LINES - render([*blocks, *tail], "md").count("\n") - 7
    evidence = Code("\n".join(_evidence(contents, room)), "text")
    return render([*blocks, Paragraph("Evidence", "lead"), evidence, *tail], "md") + "\n"


def _add_imported(contents: _Contents, runs: Sequence[ImportedRun]) -> None:
    contents.entries += map(_entry_of_import, runs)
    moved = []
    for pair in pairs([log_of_import(run) for run in runs]):
        base, head = pair
        ratios = changes(pair)
        time, loss = ratios.get("time"), less_one(ratios.get("loss"))
        others = (ratios.get(name) for name in ("memory", "live", "loss", "grad_norm"))
        speed = (less_one(time), None, 1 / time if time else None)
        fractions = [less_one(ratio) for ratio in others]
        metric = ALLOCATOR_PEAK if "memory" in ratios else None
        names = (head.name, base.name)
        contents.rows.append(_row(names, speed, fractions, metric, "n=1, no interval"))
        # Without the numbers of a trade-off, which the table has.
        both = beside(*pair)
        contents.doubts += [f"{head.name}: {text.partition(': time')[0]}" for text in both.doubts]
        contents.parity += [f"{text}." for text in both.divergences]
        moved += [(abs(loss), loss, head.name)] if loss is not None and isfinite(loss) else []
    if moved:
        _, largest, name = max(moved)
        contents.parity.append(
            f"Losses at equal iterations differ by {quantity.change(largest, 3)} at most ({name})."
            " Each side is one run, and how far equal runs are apart is not stated."
        )


def _add_measured(contents: _Contents, measured: Findings) -> None:
    """Arms by the gate, with intervals; everything else as cells against the reference."""
    kernels = {name: proof.text for name, proof in proofs(measured).items()}
    judged = {
        (result.sides.head, judgement.cell): judgement
        for result in measured.judged
        for judgement in result.of_metric("step_time")
    }
    contents.advice += _advice(measured)
    contents.entries += [_entry_of_cell(c, kernels.get(c.name, "")) for c in measured.finished]
    for change in measured.changes:
        time, ratio, runs = change.time_change, change.throughput_ratio, change.sample_note
        judgement = judged.get(change.head.block_name)
        if judgement is not None and judgement.time_ratio is not None:
            time, ratio = judgement.time_ratio - 1, judgement.throughput_ratio
            runs = f"n={judgement.n_head}, {judgement.verdict}"
        speed = (time, None if judgement is None else judgement.interval, ratio)
        fractions = [change.memory_change, *map(change.of, (LIVE_STORAGE, LOSS, GRAD_NORM))]
        names = (change.head.name, change.base.name)
        contents.rows.append(_row(names, speed, fractions, change.memory_metric, runs))
    if measured.changes and (timeless := [cell.name for cell in measured.without_a_time]):
        contents.doubts.append(f"in no row, for want of a time: {', '.join(timeless)}")
    contents.doubts += [f"{flag.cell}: {flag.text}" for flag in measured.flags]
    contents.parity += _parity(measured)


def _row(
    names: tuple[str, str],
    speed: tuple[float | None, tuple[float, float] | None, float | None],
    fractions: Sequence[float | None],
    memory_metric: Metric | None,
    runs: str,
) -> tuple[str, ...]:
    """speed: change of time, its interval, ratio of throughput. fractions: from memory on.

    memory_metric: what the first of them is a change of.
    """
    time, interval, ratio = speed
    memory, *others = (
        quantity.change(fraction, digits)
        for fraction, digits in zip(fractions, (2, 2, 3, 2), strict=True)
    )
    texts = (
        quantity.change(time, 2),
        interval_text(interval),
        quantity.change(less_one(ratio), 2),
        quantity.ratio(ratio),
        memory,
        memory_metric.title if memory_metric else quantity.MISSING,
        *others,
    )
    # A number stays on the line of its sign of per cent.
    unbroken = (text.replace(" %", "\N{NO-BREAK SPACE}%") for text in texts)
    return (*names, *unbroken, runs)


def _parity(measured: Findings) -> Iterator[str]:
    yield from (f"{'; '.join(wire_verdicts(group))}." for group in measured.wires)
    named = {row.cell.name for group in measured.wires for row in group.rows}
    for group in measured.parity:
        rows = [row for row in group.rows if row.verdict != "reference"]
        broken = any(row.verdict in ("diverges", "other start") for row in group.rows)
        if not broken and {row.cell.name for row in group.rows} <= named:
            continue
        words = []
        if group.compared:
            good = sum(row.verdict == "parity" for row in group.compared)
            words.append(f"{good} of {quantity.counted(len(group.compared), 'cell')} in parity")
        words += [
            f"{row.cell.name} {row.verdict}" + (f" ({row.moved})" if row.moved else "")
            for row in rows
            if row.verdict != "parity"
        ]
        if words:
            yield f"Loss parity (bound {group.tolerance.bound:.1e}): {', '.join(words)}."


def _advice(measured: Findings) -> Iterator[Block]:
    """What the report opens with, and the first reasons; nothing of runs that did not finish."""
    for block in recommendation(measured) if measured.finished else ():
        if isinstance(block, Bullets):
            reasons = [f"{name}: {text}" for name, text in block.items]
            yield from _listed("", reasons, _MOST_REASONS, "reason")
        elif isinstance(block, Paragraph):
            yield block


def _comparisons(contents: _Contents) -> Iterator[Block]:
    """Everything above the evidence."""
    yield from contents.advice
    if contents.rows:
        columns = zip(_TITLES, *contents.rows, strict=True)
        titles, *rows = zip(*(c for c in columns if {*c[1:]} != {quantity.MISSING}), strict=True)
        yield from reversed(folded_blocks(Table.of(" | ".join(titles), rows[:_MOST_ROWS])))
        if (more := len(rows) - _MOST_ROWS) > 0:
            yield Paragraph(f"and {quantity.counted(more, 'more comparison')}")
    yield from _listed("Trade-offs and unlike things", contents.doubts, _MOST_DOUBTS, "doubt")
    if contents.parity:
        yield Paragraph(_short(" ".join(contents.parity), 3 * _SENTENCE), title="Parity")
    kernels = [f"{entry.name}: {entry.kernels}" for entry in contents.entries if entry.kernels]
    yield from _listed("NCCL", kernels, _MOST_KERNELS, "run")


def _listed(title: str, texts: Sequence[str], most: int, noun: str) -> Iterator[Block]:
    """The first texts, and how many more there are; nothing where there is none."""
    shown, more = [_short(text) for text in texts[:most]], len(texts) - most
    shown += [f"and {quantity.counted(more, f'more {noun}')}"] if more > 0 else []
    if shown:
        yield Bullets(tuple(("", text) for text in shown), title=title)


def _evidence(contents: _Contents, room: int) -> list[str]:
    """Lines of what is compared first, then of the rest; at most `room`, but for one run's."""
    compared = dict.fromkeys(name for head, base, *_ in contents.rows for name in (base, head))
    place = {name: at for at, name in enumerate(compared)}
    ordered = sorted(contents.entries, key=lambda entry: place.get(entry.name, len(place)))
    lines: list[str] = []
    for number, entry in enumerate(ordered):
        if number and len(lines) + 1 + len(entry.lines) > room:
            lines.append(f"# and {quantity.counted(len(ordered) - number, 'more run')}")
            break
        lines += [f"# {entry.title}", *entry.lines]
    return lines


def _short(text: str, most: int = _SENTENCE) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip(" .,;:") + " ..."


_MIB = 2.0**20
_LEAST_BYTES = 1024
"""Smaller messages are scalars of the loop, not gradients or weights."""


class PostEntry(NamedTuple):
    """title: the label with its configuration. lines: memory and iteration, as text.

    reproduce: how to have the run again. kernels: what NCCL's lines show, "" where there are none.
    """

    name: str
    title: str
    lines: tuple[str, ...]
    reproduce: str
    kernels: str = ""


def _entry_of_import(run: ImportedRun) -> PostEntry:
    """That of an imported run: its line as it stood, but for what stood before it."""
    last = run.steps[-1] if run.steps else None
    work, origin = run.workload, run.provenance
    lines = [] if last is None else [*_memory_of_log(last), _iteration(last, work)]
    label = origin.label or run.id
    length = "" if work.seq_len is None else f"sequence {work.seq_len:,}"
    if work.seq_len is not None:
        forms = (str(work.seq_len), f"{work.seq_len:,}", f"{work.seq_len // 1024}K")
        length = "" if any(form in origin.label.upper() for form in forms) else length
    ranks = "" if work.ranks is None else f"{work.ranks} ranks"
    facts = filter(None, (work.model, length, ranks, work.device, work.strategy))
    config = ", ".join(fact for fact in facts if fact.lower() not in label.lower())
    kernels = Counter(filter(None, map(_kernel, run.nccl)))
    return PostEntry(
        run.id,
        printable(f"{label} ({config})" if config else label),
        tuple(map(printable, lines)),
        f"mfsdp-bench import {printable(origin.source)}  # sha256 {origin.sha256[:12]}",
        ", ".join(f"{op} {kind}: {n} lines" for (op, kind), n in sorted(kernels.items())),
    )


def _entry_of_cell(cell: Cell, kernels: str) -> PostEntry:
    """That of a measured cell: medians over its runs, losses and memory of its last step."""
    resolved, record = cell.resolved, cell.runs[0].record
    train = resolved.train
    step = ImportedStep(
        train.steps,
        cell.value(STEP_TIME),
        cell.value(LOSS),
        cell.value(GRAD_NORM),
        teraflops_per_device=cell.value(TFLOPS),
        extra={"timestamp": record.status.started_utc[:19].replace("T", " ")},
    )
    peaks = {
        "max allocated: ": ALLOCATOR_PEAK,
        f"ledger peak: {cell.bound_sign(LEDGER_PEAK)}": LEDGER_PEAK,
        "resident: ": RSS,
    }
    memory = _memory(train.steps, {name: cell.value(metric) for name, metric in peaks.items()})
    config = (
        f"{resolved.engine.name} {resolved.strategy}, {cell.dtypes}, {resolved.model_text},"
        f" sequence {train.seq_len:,}, {resolved.launch.ranks} {resolved.launch.device} ranks"
    )
    commit = entries(record.environment, "git").get("commit")
    argv = [str(word) for word in record.environment.get("argv") or ("run", "...")]
    command = printable(" ".join(["mfsdp-bench", *(argv[1:] or ["run"])]))
    return PostEntry(
        cell.name,
        printable(f"{cell.name} ({config})"),
        tuple(map(printable, (*memory, _iteration(step, record.workload)))),
        command + (f"  # commit {str(commit)[:12]}" if commit else ""),
        kernels,
    )


def _kernel(line: str) -> tuple[str, str] | None:
    """Operation and kind of kernel that a line of NCCL tells; None for scalars and other lines."""
    tuning = events.tuning(line.partition(" NCCL INFO ")[2].encode())
    if tuning and tuning.operation and tuning.kind and tuning.size_bytes >= _LEAST_BYTES:
        return tuning.operation, tuning.kind
    return None


def _iteration(step: ImportedStep, work: Workload) -> str:
    numbers = (
        ("elapsed time per iteration (ms)", step.milliseconds, ".1f"),
        ("throughput per GPU (TFLOP/s/GPU)", step.teraflops_per_device, ".4g"),
        ("global batch size", work.global_batch, "d"),
        ("lm loss", step.loss, ".6E"),
        ("grad norm", step.grad_norm, ".3f"),
    )
    stamp = step.extra.get("timestamp")
    parts = [f"{name}: {value:{form}}" for name, value, form in numbers if value is not None]
    start = f"[{stamp}] " if stamp else ""
    return f"{start}iteration {step.step:8d}/{work.steps or step.step:8d} | {' | '.join(parts)} |"


def _memory_of_log(step: ImportedStep) -> list[str]:
    numbers = {
        "allocated: ": step.device_allocated_bytes,
        "max allocated: ": step.device_peak_bytes,
        "reserved: ": step.device_reserved_bytes,
        "max reserved: ": step.device_reserved_peak_bytes,
    }
    return _memory(int(float(step.extra.get("memory after iterations", step.step))), numbers)


def _memory(after: int, numbers: Mapping[str, float | None]) -> list[str]:
    """The line, where any number is known: bytes, by what stands before them."""
    known = [f"{name}{size / _MIB:.2f}" for name, size in numbers.items() if size is not None]
    line = f"[Rank 0] (after {after} iterations) memory (MB) | {' | '.join(known)}"
    return [line] if known else []
