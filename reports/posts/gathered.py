"""What a post is about: entries in their order, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.derive.metrics import LIVE_STORAGE
from bench.errors import NothingMeasuredError
from bench.store import ResultsStore
from reports.compare.change import Change, less_one
from reports.compare.judge import Judgement
from reports.compare.logs import beside
from reports.compare.parity import wire_verdicts
from reports.findings import Findings, find
from reports.posts import entries
from reports.posts.entries import PostEntry
from reports.posts.pairs import Pair, changes, pairs
from reports.renderers import quantity
from reports.sections.nccl import proofs
from reports.views.sweep_view import load_sweeps


@dataclass(frozen=True)
class Delta:
    """Head against base. Fractions; ratio: of throughput. interval: of the ratio of times.

    memory: of the peak; live: of the storage that is held between two steps.
    """

    head: str
    base: str
    time: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    memory: float | None
    live: float | None
    loss: float | None
    norm: float | None
    runs: str


@dataclass(frozen=True)
class Gathered:
    """title: of what. doubts: trade-offs and unlike things, in words. parity: in a sentence."""

    title: str
    entries: tuple[PostEntry, ...]
    deltas: tuple[Delta, ...]
    doubts: tuple[str, ...]
    parity: str


def gather(store: ResultsStore, names: Sequence[str]) -> Gathered:
    """Of the named sweeps and imports; of all that the folder holds if none is named.

    Raises:
        UsageError: a name that is neither.
        NothingMeasuredError: no run has finished, and none was imported.
    """
    known = store.imports.ids()
    chosen = [store.imports.read(one) for one in (names or known) if one in known]
    sweeps = [one for one in names if one not in known] if names else store.sweeps()
    if not names:
        # As they stand in their text.
        chosen.sort(key=lambda run: (run.provenance.source, run.provenance.lines or (0, 0)))
    stems = dict.fromkeys(run.id.partition(".")[0] for run in chosen)
    if len(stems) == 1:
        chosen = [replace(run, id=run.id.partition(".")[2] or run.id) for run in chosen]
    found = [entries.of_import(run) for run in chosen]
    compared = list(pairs([entry.run for entry in found]))
    deltas = [_of_pair(pair) for pair in compared]
    doubts = [
        f"{pair[1].name}: {_without_numbers(text)}"
        for pair in compared
        for text in beside(*pair).doubts
    ]
    parity = [_parity_of(compared)] if deltas else []
    if sweeps:
        measured = find(store, load_sweeps(store, sweeps))
        kernels = {name: proof.text for name, proof in proofs(measured).items()}
        found += (_with_kernels(entries.of_cell(cell), kernels) for cell in measured.finished)
        deltas += _measured(measured)
        doubts += (f"{flag.cell}: {flag.text}" for flag in measured.flags)
        parity += _measured_parity(measured)
    if not found:
        raise NothingMeasuredError(f"{store.root} holds no finished and no imported run")
    title = ", ".join([*sweeps, *stems])
    return Gathered(title, tuple(found), tuple(deltas), tuple(doubts), " ".join(parity))


def _without_numbers(text: str) -> str:
    """Without the numbers of a trade-off, which the table has."""
    return text.partition(": time")[0]


def _of_pair(pair: Pair) -> Delta:
    told = changes(pair)
    time = told.get("time")
    return Delta(
        pair[1].name,
        pair[0].name,
        less_one(time),
        1 / time if time else None,
        None,
        less_one(told.get("memory")),
        None,
        less_one(told.get("loss")),
        less_one(told.get("grad_norm")),
        "n=1, no interval",
    )


def _measured(measured: Findings) -> list[Delta]:
    """Arms by the gate, with intervals; everything else as cells against the reference."""
    judged = {
        (result.sides.head, one.cell): one
        for result in measured.judged
        for one in result.judgements
        if one.metric == "step_time"
    }
    return [_of_change(change, judged.get(change.head.block_name)) for change in measured.changes]


def _of_change(change: Change, judged: Judgement | None) -> Delta:
    time = change.time_change
    ratio = change.throughput_ratio
    runs = change.sample_note
    if judged is not None and judged.time_ratio is not None:
        time, ratio = judged.time_ratio - 1, judged.throughput_ratio
        runs = f"n={judged.n_head}, {judged.verdict}"
    return Delta(
        change.head.name,
        change.base.name,
        time,
        ratio,
        None if judged is None else judged.interval,
        change.memory_change,
        change.others.get(LIVE_STORAGE.name),
        change.loss_difference,
        change.norm_difference,
        runs,
    )


def _parity_of(compared: Sequence[Pair]) -> str:
    losses = [(pair[1].name, changes(pair).get("loss")) for pair in compared]
    moved = [(abs(one - 1), one - 1, name) for name, one in losses if one is not None]
    if not moved:
        return ""
    _, change, name = max(moved)
    return (
        f"Losses at equal iterations differ by {100 * change:+.3f} % at most ({name})."
        " Each side is one run, and how far equal runs are apart is not stated."
    )


def _measured_parity(measured: Findings) -> list[str]:
    found = [f"{'; '.join(wire_verdicts(group))}." for group in measured.wires]
    named = {row.cell.name for group in measured.wires for row in group.rows}
    for group in measured.parity:
        if all(
            row.cell.name in named and row.verdict not in ("diverges", "other start")
            for row in group.rows
        ):
            continue
        rows = [row for row in group.rows if row.verdict != "reference"]
        compared = group.compared
        good = sum(row.verdict == "parity" for row in compared)
        words = [
            f"{row.cell.name} {row.verdict}" + (f" ({row.moved})" if row.moved else "")
            for row in rows
            if row.verdict != "parity"
        ]
        if compared:
            words = [f"{good} of {quantity.counted(len(compared), 'cell')} in parity", *words]
        if words:
            bound = f"bound {group.tolerance.bound:.1e}"
            found.append(f"Loss parity ({bound}): {', '.join(words)}.")
    return found


def _with_kernels(entry: PostEntry, kernels: Mapping[str, str]) -> PostEntry:
    text = kernels.get(entry.name)
    return entry if text is None else replace(entry, kernels=text)
