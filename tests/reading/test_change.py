"""What changed between two cells, in three numbers of speed, memory and loss; what it cost."""

from __future__ import annotations

import re

import pytest
from recorded_runs import Recorded, held, keep_changes, record_run, recorded_cell, resolved_run

from bench.derive.metrics import LEDGER_PEAK, LIVE_STORAGE, LOSS, MEMORY, RSS
from reports.compare.change import Change, flag_table, memory_metric, tradeoff_flags
from reports.compare.parity import parity_groups
from reports.compare.samples import cell_samples, shared_metric
from reports.posts.pull_request import pull_request
from reports.sections.cell_table import best_cells
from reports.views.cells import make_cell

DDP = resolved_run("ddp", "no_shard")
LOW = resolved_run("ddp", "no_shard", dtype="bf16", comm="bf16")


@pytest.mark.parametrize(
    ("before", "after", "time", "throughput"),
    [
        (200.0, 100.0, -0.5, 1.0),
        (3300.5, 2559.1, -0.2246, 0.2897),  # published as 22.5 %: of time
    ],
)
def test_half_the_time_is_double_the_throughput_by_all_three_names(
    store, before, after, time, throughput
):
    base = recorded_cell(store, "a", DDP, milliseconds=lambda _: before)
    head = recorded_cell(store, "b", DDP, milliseconds=lambda _: after, loss_shift=-0.01)
    change = Change(base, head)
    assert change.time_change == pytest.approx(time, abs=1e-4)
    assert change.throughput_change == pytest.approx(throughput, abs=1e-4)
    assert change.throughput_ratio == pytest.approx(before / after)
    assert change.of(LOSS) == pytest.approx(-0.01, rel=0.01)


def test_of_an_even_number_of_runs_the_three_names_are_still_one_change(store):
    for name, levels in (("a", (100.0, 300.0)), ("b", (100.0, 200.0))):
        for repeat, level in enumerate(levels):
            run = {"milliseconds": lambda _, level=level: level, "repeat": repeat}
            record_run(store, Recorded(DDP, cell=name, sweep=name, **run))
    base, head = (make_cell(name, store.records(sweep=name)) for name in ("a", "b"))
    change = Change(base, head)
    assert change.time_change == pytest.approx(-0.25, rel=0.01)
    assert change.throughput_change + 1 == pytest.approx(1 / (1 + change.time_change))


@pytest.mark.parametrize(
    ("base", "head", "note"),
    [
        (1, 1, "n=1, no interval"),
        (1, 3, "n=3 against 1, no interval"),
        (3, 3, "n=3 against 3, no verdict"),
    ],
)
def test_the_number_of_runs_is_said_with_what_follows_from_it(store, base, head, note):
    one, other = (recorded_cell(store, n, DDP, runs=r) for n, r in (("a", base), ("b", head)))
    assert Change(one, other).sample_note == note


def test_an_unsteady_side_has_no_time_but_memory_and_loss(store):
    base = recorded_cell(store, "a", DDP)
    head = recorded_cell(store, "b", DDP, milliseconds=lambda step: 100 * 1.07**step)
    change = Change(base, head)
    assert (change.time_change, change.throughput_ratio) == (None, None)
    assert (change.memory_change, change.of(LOSS)) == (0.0, 0.0)
    assert change.sample_note == "no time to compare"


def test_memory_is_compared_by_the_most_telling_number_both_sides_have(store):
    base, head = (recorded_cell(store, name, DDP) for name in "ab")
    assert memory_metric([base, head]) is LEDGER_PEAK
    for path in (store.root / "runs").glob("*/*/memory.json"):
        path.unlink()
    keep_changes(store)
    without = make_cell("a", store.records(sweep="a"))
    assert memory_metric([without, head]) is RSS


OPTIM, WHOLE = "optim_grads", "no_shard"
MOVED = "loss moved: differs from the same dtype policy's reference"


@pytest.mark.parametrize(
    ("base", "head", "changes", "said"),
    [
        # Speed is never told without the memory it cost.
        (OPTIM, WHOLE, {"speed": 0.8}, ["faster, but more memory"]),
        (WHOLE, OPTIM, {"speed": 1.3}, ["less memory, but slower"]),
        (OPTIM, WHOLE, {"speed": 1.3}, ["slower and more memory"]),
        (WHOLE, "optim", {"speed": 0.7}, []),
        (WHOLE, WHOLE, {"loss_shift": 1e-3}, [MOVED]),
        # Of two policies, the coarser one's rounding is the yardstick.
        (WHOLE, LOW, {"speed": 1.25}, []),  # as slow as FP32 is, whatever the dtype
        (WHOLE, LOW, {"speed": 1.25, "loss_shift": 0.02}, ["coarser dtype policy's bound"]),
    ],
)
def test_a_trade_off_is_flagged_with_what_it_cost(store, base, head, changes, said):
    resolved = head if head is LOW else resolved_run("ddp", head)
    cells = [
        recorded_cell(store, "a", resolved_run("ddp", base), noise=0.0),
        recorded_cell(store, "b", resolved, noise=0.0, **changes),
    ]
    rows = {row.cell.name: row for group in parity_groups(cells) for row in group.rows}
    found = [flag.text for flag in tradeoff_flags([Change(*cells)], rows)]
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))
    if "memory" in "".join(said):
        for words in ("throughput", "ledger peak", "n=1, no interval"):
            assert words in found[0]


def test_changes_below_the_thresholds_are_no_trade_off(store):
    cells = [
        recorded_cell(
            store, strategy, resolved_run("ddp", strategy), milliseconds=lambda _, t=time: t
        )
        for strategy, time in (("optim_grads", 100.0), ("no_shard", 99.0))
    ]
    assert tradeoff_flags([Change(*cells)]) == []


def test_a_bound_is_compared_with_no_peak_but_live_storage_says_who_holds_more(store):
    cells = [
        recorded_cell(store, "a", DDP, memory=held(8.0, 6, is_bound=True), speed=1.5),
        recorded_cell(store, "b", resolved_run("mfsdp", "no_shard"), memory=held(7.0, 8)),
    ]
    change = Change(*cells)
    assert change.memory_metric is LIVE_STORAGE
    assert change.memory_change == pytest.approx(1 / 3)
    (flag,) = tradeoff_flags([change])
    assert flag.verdict == "faster, but more memory"
    assert "live storage +33.3 %" in flag.numbers
    assert "ledger" not in flag.numbers
    assert [cell.text(LEDGER_PEAK) for cell in cells] == ["<= 8.0 MiB", "7.0 MiB"]
    assert best_cells(cells, LEDGER_PEAK) == []
    assert cells[0].text(LIVE_STORAGE) == "6.0 MiB"
    text = pull_request(store, ["a", "b"])
    assert "| memory | memory metric | live storage |" in text
    assert "| +33.33 % | live storage | +33.33 % |" in text
    assert re.findall("ledger peak: ([^|]*) [|]", text) == ["<= 8.00", "7.00"]
    base, head = map(cell_samples, cells)
    assert shared_metric(MEMORY, base, head) is RSS
    assert shared_metric(MEMORY, base, base) is LEDGER_PEAK


def test_a_lower_peak_for_more_live_storage_is_a_trade_off(store):
    cells = [
        recorded_cell(store, "a", DDP, memory=held(8.0, 6)),
        recorded_cell(store, "b", DDP, memory=held(7.0, 7)),
        recorded_cell(store, "c", DDP, memory=held(7.0, 6), speed=1.5),
    ]
    flags = tradeoff_flags([Change(cells[0], head) for head in cells[1:]])
    assert [flag.verdict for flag in flags] == [
        "less ledger peak, but more live storage",
        "less ledger peak, but slower",
    ]


@pytest.mark.parametrize(("optimizer", "is_flagged"), [("sgd", True), ("muon", False)])
def test_losses_of_two_optimizers_are_not_held_to_each_other(store, optimizer, is_flagged):
    runs = [resolved_run("ddp", OPTIM), resolved_run("ddp", WHOLE)]
    trains = [run.train.model_copy(update={"optimizer": name}) for run, name in
              zip(runs, ("sgd", optimizer), strict=True)]  # fmt: skip
    cells = [
        recorded_cell(store, name, run.model_copy(update={"train": train}), loss_shift=shift)
        for name, run, train, shift in zip("ab", runs, trains, (0.0, 0.1), strict=True)
    ]
    flags = [flag.verdict for flag in tradeoff_flags([Change(*cells)])]
    assert ("loss moved" in flags) == is_flagged


def test_trade_offs_are_a_table_with_their_numbers_in_columns(store):
    cells = [
        recorded_cell(store, "a", resolved_run("ddp", OPTIM)),
        recorded_cell(store, "b", resolved_run("ddp", WHOLE), speed=0.8, loss_shift=0.1),
    ]
    rows = {row.cell.name: row for group in parity_groups(cells) for row in group.rows}
    table = flag_table(tradeoff_flags([Change(*cells)], rows))
    titles = ["cell", "trade-off", "what", "runs", "throughput", "ledger peak"]
    assert [column.title for column in table.columns] == titles
    first, second = (row.cells for row in table.rows)
    assert first[:4] == ("b", "faster, but more memory", "", "n=1, no interval")
    assert all(text.endswith(" %") for text in first[4:])
    assert second[1] == "loss moved"
    assert second[4:] == ("", "")
