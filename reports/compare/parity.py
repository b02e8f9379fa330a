"""Loss parity: do cells that should compute the same report the same losses and gradient norms?

Cells belong to one group when model, data, training settings, dtypes and device type agree; then
every engine starts from the same weights and consumes the same global batches, and only the order
of sums and the places of rounding differ. Each group has its own reference cell and its own bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from bench.derive.metrics import GRAD_NORM
from bench.derive.summary import common_steps
from bench.record import RunRecord
from bench.spec import ResolvedRun
from bench.spec.names import HYBRID_NAMES, SHARDED
from reports.compare.series import LOSSES, NORMS, Gap
from reports.views.cells import Cell, dtype_policy
from reports.views.machine import entries
from reports.views.reference import choose_reference

Verdict = Literal[
    "reference", "parity", "diverges", "steps differ", "other start", "nothing to compare with"
]

EXACT_BOUNDS = {"fp64": 1e-10, "fp32": 1e-5}
"""Relative bounds where every dtype is at least this wide."""

SPREAD_FACTOR = 3.0
"""A cell may differ from the reference by this many times what established engines differ."""

CALIBRATION_LIMIT = 4.0
"""The calibrated bound never passes this many unit roundoffs: a broken engine is no yardstick."""

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
"""Largest relative error of one rounding to nearest (half the distance of neighbours)."""


@dataclass(frozen=True)
class Tolerance:
    """A relative bound on the loss at every step, and in words where it comes from."""

    bound: float
    derivation: str


@dataclass(frozen=True)
class ParityRow:
    """One cell against its group's reference, the worst of its runs.

    max_relative: largest |loss - reference| / |reference| over the compared steps; `at_step` is
    where. norms: `Distances` of gradient norms, None where a side has none. first_divergent_step:
    first step beyond a bound, None if there is none. moved: what is, `loss` where both are; of
    another start, the first parameter that begins otherwise.
    """

    cell: Cell
    verdict: Verdict
    steps: int = 0
    max_relative: float | None = None
    at_step: int | None = None
    norms: tuple[float, float] | None = None
    first_divergent_step: int | None = None
    moved: str = ""


@dataclass(frozen=True)
class ParityGroup:
    """Cells that should agree. `repeat_spread`: largest difference among runs of one cell."""

    label: str
    reference: Cell
    tolerance: Tolerance
    rows: tuple[ParityRow, ...]
    repeat_spread: float | None

    @property
    def compared(self) -> tuple[ParityRow, ...]:
        """The rows of cells that have a reference to agree with."""
        neither = ("reference", "nothing to compare with")
        return tuple(row for row in self.rows if row.verdict not in neither)

    @property
    def sums(self) -> dict[str, list[str]]:
        """Names of cells by the dtype in which gradients are added up over ranks."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            dtypes = row.cell.resolved.dtypes
            names.setdefault(dtypes.reduce or dtypes.grad_comm, []).append(row.cell.name)
        return names

    @property
    def observed_spread(self) -> float | None:
        """Largest difference of any compared cell, for comparison with the bound."""
        differences = [r.max_relative for r in self.rows if r.verdict in ("parity", "diverges")]
        known = [value for value in differences if value is not None]
        return max(known) if known else None


def parity_groups(cells: Sequence[Cell]) -> list[ParityGroup]:
    """Groups of all cells that finished, in the order of their first cell."""
    alike = _alike(cells, {"reduce"})
    policies = [_policy(members[0].resolved) for members in alike]
    groups = []
    for members, policy in zip(alike, policies, strict=True):
        label = policy if policies.count(policy) == 1 else f"{policy} ({_problem(members[0])})"
        groups.append(_group(members, label))
    return groups


GRADIENT_DTYPES = frozenset({"main_grads", "grad_comm", "reduce"})
"""In what gradients are kept, sent and added up over ranks."""


def wire_groups(cells: Sequence[Cell]) -> list[ParityGroup]:
    """Groups of cells that differ in the dtypes of gradients alone, where any do.

    One reference per model and batch, of the widest dtypes; the bound is that of the narrowest
    dtype in the group. What established engines differ by does not widen it: here the dtypes are
    the question.
    """
    groups = []
    for members in _alike(cells, GRADIENT_DTYPES):
        if len({_wire(cell.resolved) for cell in members}) > 1:
            reference = choose_reference(members, None, lambda cell: bool(cell.finished))
            bounds = (tolerance_of(cell.finished[0].record) for cell in members)
            widest = max(bounds, key=lambda tolerance: tolerance.bound)
            base = reference or members[0]
            rows = tuple(_row(cell, base, widest, alone=False) for cell in members)
            groups.append(ParityGroup(_problem(base), base, widest, rows, None))
    return groups


def wire_verdicts(group: ParityGroup) -> list[str]:
    """One sentence per sharding and dtypes of gradients: `FSDP, BF16 wire: equal within 5.2e-04`.

    The worst of the cells that share both.
    """
    engines = {row.cell.resolved.engine.name for row in group.rows}
    worst: dict[str, ParityRow] = {}
    for row in group.compared:
        run = row.cell.resolved
        name = ", ".join([*([run.engine.name] if len(engines) > 1 else []), _sharding(run)])
        name += f", {_wire(run)}"
        worst[name] = max(worst.get(name, row), row, key=_badness)
    bound = f"(bound {group.tolerance.bound:.1e})"
    sentences = []
    for name, row in worst.items():
        most = f"{row.max_relative or 0.0:.1e}"
        verdict: str = row.verdict
        if row.verdict == "parity":
            verdict = f"equal within {most}" if row.max_relative else "equal"
        if row.verdict == "other start":
            verdict = f"{row.verdict}, as of {row.moved}"
        if row.verdict == "diverges":
            verdict = f"{row.moved} differs from step {row.first_divergent_step}, losses by {most}"
        sentences.append(f"{name}: {verdict} {bound}")
    return sentences


def _sharding(run: ResolvedRun) -> str:
    shards_all = "weights" in SHARDED[run.strategy]
    if run.engine.outer_size > 1:
        hybrid = HYBRID_NAMES[run.engine.outer_strategy].upper()
        return hybrid if shards_all else f"{hybrid} {run.strategy}"
    return "FSDP" if shards_all else run.strategy


def _wire(run: ResolvedRun) -> str:
    dtypes = run.dtypes
    text = f"{dtypes.grad_comm.upper()} wire"
    if dtypes.reduce not in (None, dtypes.grad_comm):
        text += f", {dtypes.reduce.upper()} sums"
    if dtypes.main_grads != (dtypes.main_params or dtypes.compute):
        text += f", {dtypes.main_grads.upper()} gradients"
    return text


def tolerance_for(resolved: ResolvedRun) -> Tolerance:
    """The bound of a dtype policy."""
    dtypes = resolved.dtypes
    used = {dtypes.compute, dtypes.main_grads, dtypes.grad_comm, dtypes.main_params}
    widest_rounding = max((name for name in used if name), key=UNIT_ROUNDOFF.__getitem__)
    if widest_rounding in EXACT_BOUNDS:
        bound = EXACT_BOUNDS[widest_rounding]
        why = (
            f"every dtype is at least {widest_rounding}, so only the order of sums differs; fixed "
            f"bound {bound:g}"
        )
        return Tolerance(bound, why)
    bound = UNIT_ROUNDOFF[widest_rounding]
    why = (
        f"the unit roundoff of {widest_rounding}, 2^{int(math.log2(bound))} = {bound:.2e} (engines "
        "round at different places; this admits one rounding of every token's loss, all in one "
        "direction)"
    )
    return Tolerance(bound, why)


def tolerance_of(record: RunRecord) -> Tolerance:
    """That of its dtypes, and where Muon trained, of its updates.

    torch.optim.Muon's Newton-Schulz iteration casts a gradient of any dtype to BF16 and computes in
    it, so the order of sums may round every element of an update differently, but for weights that
    no update has moved yet. So of what training has moved the loss by, one rounding is admitted.
    """
    tolerance = tolerance_for(record.resolved)
    if record.resolved.train.optimizer != "muon" or not all(values := [*losses(record).values()]):
        return tolerance
    moved = max((abs(1 - values[0] / value) for value in values), default=0.0)
    roundoff = UNIT_ROUNDOFF["bf16"]
    why = (
        f"{tolerance.derivation}; and {roundoff:.2e}, the unit roundoff of the bf16 in which Muon"
        f" computes updates, of the {moved:.2f} by which they moved the loss"
    )
    return Tolerance(tolerance.bound + roundoff * moved, why)


def losses(record: RunRecord, name: str = "loss") -> dict[int, float]:
    """Mean loss, or gradient norm, over ranks by step, from 1; empty where nothing is trained.

    Ends before the first step that a rank lacks.
    """
    means: dict[int, float] = {}
    for step, ranks in enumerate(common_steps(record.steps), start=1):
        values = [value for sample in ranks if (value := getattr(sample, name)) is not None]
        if len(values) < len(ranks):
            break
        means[step] = sum(values) / len(values)
    return means


def _group(members: Sequence[Cell], label: str) -> ParityGroup:
    reference = choose_reference(members, None, lambda cell: bool(cell.finished)) or members[0]
    repeats = [spread for cell in members if (spread := _repeat_spread(cell)) is not None]
    repeat_spread = max(repeats, default=None)
    tolerance = _calibrated(
        tolerance_of(reference.finished[0].record), reference, members, repeat_spread
    )
    rows = tuple(_row(cell, reference, tolerance, alone=len(members) == 1) for cell in members)
    return ParityGroup(label, reference, tolerance, rows, repeat_spread)


def _calibrated(
    tolerance: Tolerance, reference: Cell, members: Sequence[Cell], repeat_spread: float | None
) -> Tolerance:
    """Widen a low-precision bound by what is known to be noise.

    Training amplifies rounding: two correct implementations part further with every step, by an
    amount that no dtype alone tells. What established engines, and repeats of one cell, differ
    among themselves is such noise by definition.
    """
    if tolerance.bound in EXACT_BOUNDS.values():
        return tolerance
    others = [cell for cell in members if cell is not reference and _is_established(cell)]
    if not _is_established(reference):
        others = []
    spreads = [_row(cell, reference, tolerance, alone=False).max_relative for cell in others]
    spread = max((v for v in (*spreads, repeat_spread) if v is not None), default=0.0)
    bound = min(SPREAD_FACTOR * spread, CALIBRATION_LIMIT * tolerance.bound)
    if bound <= tolerance.bound:
        return tolerance
    names = ", ".join(cell.name for cell in (reference, *others))
    why = (
        f"{SPREAD_FACTOR:g} times the {spread:.1e} by which established engines ({names}) or "
        f"repeats of one cell differ among themselves, at most {CALIBRATION_LIMIT:g} times "
        f"{tolerance.derivation}"
    )
    return Tolerance(bound, why)


def _is_established(cell: Cell) -> bool:
    """Whether the engine's disagreement may calibrate the bound of a low-precision policy."""
    row = cell.resolved.engine.row
    return row is not None and row.established


def _row(cell: Cell, reference: Cell, tolerance: Tolerance, *, alone: bool) -> ParityRow:
    base = reference.finished[0].record
    if cell is reference:
        verdict: Verdict = "nothing to compare with" if alone else "reference"
        return ParityRow(cell, verdict, steps=len(losses(base)))
    candidates = [_compared(cell, run.record, base, tolerance.bound) for run in cell.finished]
    return max(candidates, key=_badness)


def _compared(cell: Cell, head: RunRecord, base: RunRecord, bound: float) -> ParityRow:
    if other := other_start(head, base):
        return ParityRow(cell, "other start", moved=other[0])
    ours, theirs = losses(head), losses(base)
    gap = Gap.of(theirs, ours)
    if gap is None:
        return ParityRow(cell, "steps differ")
    of_norms = Gap.of(losses(base, GRAD_NORM.name), losses(head, GRAD_NORM.name))
    row = ParityRow(
        cell,
        "parity" if len(ours) == len(theirs) else "steps differ",
        len(gap.apart),
        abs(gap.largest),
        gap.at,
        NORMS.of(of_norms) if of_norms else None,
    )
    step, moved = LOSSES.first_beyond(gap, LOSSES.bounds(bound)), "loss"
    if step is None and of_norms:
        step, moved = NORMS.first_beyond(of_norms, NORMS.bounds(bound)), "gradient norm"
    if step is None:
        return row
    return replace(row, verdict="diverges", first_divergent_step=step, moved=moved)


def other_start(head: RunRecord, base: RunRecord) -> list[str]:
    """Parameters that begin with other bits on one side, where both sides say."""
    ours, theirs = (entries(record.runtime, "start") for record in (head, base))
    both = [name for name in theirs if name in ours]
    return [name for name in both if ours[name] != theirs[name] or ours[name] == "unequal"]


def _badness(row: ParityRow) -> tuple[int, float]:
    order = {"parity": 0, "steps differ": 1, "diverges": 2, "other start": 3}
    return order.get(row.verdict, 0), max((row.max_relative or 0.0, *(row.norms or ())))


def _repeat_spread(cell: Cell) -> float | None:
    """Largest difference of a repeat from the cell's first run."""
    first, *others = [losses(run.record) for run in cell.finished]
    gaps = (Gap.of(first, other) for other in others)
    return max((abs(gap.largest) if gap else 0.0 for gap in gaps), default=None)


def _alike(cells: Sequence[Cell], apart: Set[str]) -> list[list[Cell]]:
    """Finished cells that should report the same losses; apart: dtypes in which they may differ."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.finished:
            groups.setdefault(_group_key(cell.resolved, apart), []).append(cell)
    return [*groups.values()]


def _group_key(resolved: ResolvedRun, apart: Set[str]) -> str:
    """All that decides which losses a correct engine reports; not how it gets there."""
    train = resolved.train.model_dump(mode="json")
    del train["micro_batch"]  # the same global batch in other pieces
    shape = resolved.shape
    key = {
        "model": resolved.factory if shape is None else shape.model_dump(mode="json"),
        "data": resolved.data.model_dump(mode="json"),
        "dtypes": resolved.dtypes.model_dump(mode="json", exclude=set(apart)),
        "recipe": resolved.engine.setting("recipe") or "none",
        "linear": resolved.linear.model_dump_json(),
        "device": resolved.launch.device,
        "train": train,
    }
    return json.dumps(key, sort_keys=True)


def _policy(resolved: ResolvedRun) -> str:
    """Without the precision of sums, in which cells of a group may differ."""
    dtypes = resolved.dtypes.model_copy(update={"reduce": None})
    return dtype_policy(resolved.model_copy(update={"dtypes": dtypes}))


def _problem(cell: Cell) -> str:
    train = cell.resolved.train
    return (
        f"{cell.resolved.model_name}, {train.global_batch} x {train.seq_len} tokens, "
        f"{train.steps} steps"
    )
