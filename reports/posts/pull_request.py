"""The block of a pull request: how runs differ, lines, doubts and commands, below sixty lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.derive.metrics import LIVE_STORAGE
from bench.errors import NothingMeasuredError
from bench.store import ResultsStore
from bench.workload import ImportedRun
from reports.compare.change import less_one
from reports.compare.logs import beside
from reports.compare.logs import of_import as log_of_import
from reports.compare.parity import wire_verdicts
from reports.compare.text import interval_text
from reports.findings import Findings, find
from reports.posts import entries
from reports.posts.entries import PostEntry
from reports.posts.pairs import changes, pairs
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Code, Heading, Paragraph, folded_blocks
from reports.renderers.render import render
from reports.renderers.table import Table
from reports.sections.nccl import proofs
from reports.views.sweep_view import load_sweeps

MOST_LINES = 59
_TITLES: tuple[str, ...] = (
    *("run", "<against", "time", "interval", "throughput", "ratio", "memory", "live storage"),
    *("loss", "grad norm", "<runs"),
)
_LIVE = _TITLES.index("live storage")
_MOST_ROWS = 10
_MOST_DOUBTS = 5
_MOST_COMMANDS = 3
_MOST_KERNELS = 4
_SENTENCE = 220


@dataclass
class _Contents:
    """rows: texts below `_TITLES`, head against base. doubts: trade-offs and unlike things."""

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
    contents.entries += map(entries.of_import, runs)
    moved = []
    for pair in pairs([log_of_import(run) for run in runs]):
        base, head = pair
        ratios = changes(pair)
        time, loss = ratios.get("time"), less_one(ratios.get("loss"))
        others = (ratios.get(name) for name in ("memory", "live", "loss", "grad_norm"))
        speed = (less_one(time), None, 1 / time if time else None)
        fractions = [less_one(ratio) for ratio in others]
        contents.rows.append(_row((head.name, base.name), speed, fractions, "n=1, no interval"))
        # Without the numbers of a trade-off, which the table has.
        doubts = beside(*pair).doubts
        contents.doubts += [f"{head.name}: {text.partition(': time')[0]}" for text in doubts]
        moved += [] if loss is None else [(abs(loss), loss, head.name)]
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
    contents.entries += [entries.of_cell(c, kernels.get(c.name, "")) for c in measured.finished]
    for change in measured.changes:
        time, ratio, runs = change.time_change, change.throughput_ratio, change.sample_note
        judgement = judged.get(change.head.block_name)
        if judgement is not None and judgement.time_ratio is not None:
            time, ratio = judgement.time_ratio - 1, judgement.throughput_ratio
            runs = f"n={judgement.n_head}, {judgement.verdict}"
        speed = (time, None if judgement is None else judgement.interval, ratio)
        live = change.of(LIVE_STORAGE)
        fractions = [change.memory_change, live, change.loss_difference, change.norm_difference]
        contents.rows.append(_row((change.head.name, change.base.name), speed, fractions, runs))
    contents.doubts += [f"{flag.cell}: {flag.text}" for flag in measured.flags]
    contents.parity += _parity(measured)


def _row(
    names: tuple[str, str],
    speed: tuple[float | None, tuple[float, float] | None, float | None],
    fractions: Sequence[float | None],
    runs: str,
) -> tuple[str, ...]:
    """speed: change of time, its interval, ratio of throughput. fractions: from memory on."""
    time, interval, ratio = speed
    texts = (
        quantity.change(time, 2),
        interval_text(interval),
        quantity.change(less_one(ratio), 2),
        quantity.ratio(ratio),
        *(
            quantity.change(fraction, digits)
            for fraction, digits in zip(fractions, (2, 2, 3, 2), strict=True)
        ),
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


def _comparisons(contents: _Contents) -> Iterator[Block]:
    """Everything above the evidence."""
    if contents.rows:
        titles, rows = _TITLES, contents.rows
        if all(row[_LIVE] == quantity.MISSING for row in rows):
            titles, *rows = (row[:_LIVE] + row[_LIVE + 1 :] for row in (titles, *rows))
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
