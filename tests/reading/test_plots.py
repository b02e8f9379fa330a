"""The figures' own arithmetic: names apart, one look per cell, whatever the numbers are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import (
    Recorded,
    keep_changes,
    quickstart_cells,
    record_run,
    recorded_cell,
    resolved_run,
)

from bench.derive.metrics import LEDGER_PEAK
from reports.compare.parity import parity_groups
from reports.plots.loss import MOST_CURVES, MOST_GROUPS, loss_figure, most_different
from reports.plots.step_time import step_time_figure
from reports.plots.style import looks, wrapped
from reports.plots.throughput import (
    legend_handles,
    pareto_front,
    spread,
    throughput_figure,
)
from reports.views.cells import make_cell


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_names_are_apart_in_order_and_inside(heights):
    wanted = sorted(heights, reverse=True)
    gap = 1 / 40
    placed = spread(wanted, gap)
    assert all(upper - lower >= gap - 1e-9 for upper, lower in pairwise(placed))
    assert placed[0] <= 1
    assert placed[-1] >= 0
    apart = [0.05 + 0.9 * n / 10 for n in (9, 7, 3)]
    assert spread(apart, 0.05) == pytest.approx(apart)  # what has room stays beside its point


def cells_of(store, specs):
    return [recorded_cell(store, name, resolved) for name, resolved in specs]


TWO = [("a", resolved_run("ddp", "no_shard")), ("b", resolved_run("mfsdp", "optim"))]


THEIRS = [(name[:4], resolved_run(name, "no_shard")) for name in ("ddp", "a:build", "b:build")]
BY_RANKS = [(f"c{ranks}", resolved_run(ranks=ranks)) for ranks in range(1, 12)]


def test_every_cell_looks_different_and_colours_that_count_are_not_called_engines(store):
    of_engines = ["fp32", "bf16, main fp32, comm bf16", "ddp", "fsdp2", "mfsdp"]
    for specs, labels in ((quickstart_cells(), of_engines), (BY_RANKS, ["fp32"])):
        cells = cells_of(store, specs)
        assert len(set(looks(cells).values())) == len(cells)
        handles = legend_handles(cells, looks(cells))
        assert [handle.get_label() for handle in handles] == labels
        assert handles[0].get_marker() == looks(cells)[cells[0].name].marker
    assert throughput_figure(cells, LEDGER_PEAK, looks(cells)).startswith("<svg")
    cells = cells_of(store, THEIRS)
    assert len({look.colour for look in looks(cells).values()}) == 3


@pytest.mark.parametrize(
    ("shift", "time"),
    [(0.0, 1.0), (math.nan, 1.0), (math.inf, 1e-6), (1e300, 1e12)],
)
@pytest.mark.parametrize("of_both", [True, False])
def test_what_is_no_usual_number_is_drawn_without_a_warning(store, shift, time, of_both):
    cells = [
        recorded_cell(store, *one, loss_shift=shift * where, milliseconds=lambda _: time)
        for one, where in zip(TWO, (1, of_both), strict=True)
    ]
    assert loss_figure(parity_groups(cells), looks(cells)).startswith("<svg")
    assert step_time_figure(cells, looks(cells)).startswith("<svg")


def test_the_pareto_front_is_what_nobody_beats_in_throughput_and_memory():
    points = [(100.0, 50.0), (120.0, 60.0), (90.0, 40.0), (80.0, 45.0), (120.0, 70.0), (90.0, 40.0)]
    front = [points[i] for i in pareto_front(points)]
    assert front == [(90.0, 40.0), (100.0, 50.0), (120.0, 60.0)]


def test_a_long_name_is_wrapped_whole_and_two_cells_never_share_a_cut_name():
    name = "mfsdp-optim_grads_params-hfsdp2-bf16-comm_fp32-seq_len=4096-pool_slots=3"
    lines = wrapped(name, 36).split("\n")
    assert "".join(lines) == name
    assert max(map(len, lines)) <= 36
    assert wrapped("x" * 80, 36).replace("\n", "") == "x" * 80


def test_of_more_losses_than_a_figure_shows_those_are_drawn_that_differ_most(store):
    def cell(name, engine, shift=0.0, **train):
        resolved = resolved_run(engine, "no_shard", ranks=train.pop("ranks", 2))
        resolved = resolved.model_copy(update={"train": resolved.train.model_copy(update=train)})
        return recorded_cell(store, name, resolved, loss_shift=shift, noise=0.0)

    seeds = [(s, e) for s in range(MOST_GROUPS + 2) for e in ("ddp", "mfsdp")]
    shifted = {"mfsdp0", f"mfsdp{MOST_GROUPS + 1}"}
    cells = [cell(f"{e}{s}", e, 0.1 * (f"{e}{s}" in shifted), seed=s) for s, e in seeds]
    shown = most_different(parity_groups(cells))
    assert len(shown) == MOST_GROUPS
    assert shifted <= {row.cell.name for group in shown for row in group.rows}
    one = [cell(f"x{n}", "ddp", n == MOST_CURVES + 4, ranks=n) for n in range(2, MOST_CURVES + 5)]
    (group,) = most_different(parity_groups(one))
    names = [row.cell.name for row in group.rows]
    assert len(names) == MOST_CURVES + 1
    assert (names[0], names[-1]) == (group.reference.name, f"x{MOST_CURVES + 4}")


@pytest.mark.parametrize("lost", [{"max_relative": None}, {}])
def test_losses_that_cannot_be_compared_differ_most(store, lost):
    cells = [
        recorded_cell(
            store,
            f"x{n}",
            resolved_run("ddp", "no_shard", ranks=n + 1),
            noise=0.0,
            loss_shift=n * 1e-3,
        )
        for n in range(MOST_CURVES + 2)
    ]
    (group,) = parity_groups(cells)
    least = min(group.rows[1:], key=lambda row: row.max_relative)
    broken = replace(least, verdict="steps differ", **lost)
    rows = tuple(broken if row is least else row for row in group.rows)
    (shown,) = most_different([replace(group, rows=rows)])
    assert broken in shown.rows
    assert least not in most_different([group])[0].rows
    others = [replace(group, label=str(n)) for n in range(MOST_GROUPS)]
    alone = replace(group, rows=(group.rows[0], broken))
    assert alone.reference in [found.reference for found in most_different([*others, alone])]
    assert len(most_different([*others, alone])[-1].rows) == 2


@pytest.mark.parametrize(("noise", "equal"), [(0.0, True), (1.0, False)])
def test_losses_that_are_equal_are_called_so(store, noise, equal):
    cells = [recorded_cell(store, *one, noise=noise) for one in TWO]
    figure = loss_figure(parity_groups(cells), looks(cells))
    assert ("all losses are equal, bit for bit" in figure) is equal
    assert ("b (equal)" in figure) is equal


def test_losses_of_fewer_steps_are_not_called_equal(store):
    for name, engine in (("a", "ddp"), ("b", "mfsdp")):
        run = resolved_run(engine, "no_shard")
        folder = record_run(store, Recorded(run, cell=name, sweep=name, noise=0.0))
    for file in folder.path.glob("steps*"):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        cut = [one | ({"loss": None} if one["step"] > 12 else {}) for one in samples]
        file.write_text("".join(json.dumps(one) + "\n" for one in cut))
    keep_changes(store)
    cells = [make_cell(name, store.records(sweep=name)) for name in "ab"]
    figure = loss_figure(parity_groups(cells), looks(cells))
    assert "all losses are equal" not in figure
    assert "numbers of steps differ" in figure
