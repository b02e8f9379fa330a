"""Two sweeps, cells or runs: matching by configuration, and what is refused."""

from __future__ import annotations

import json

import pytest
from recorded_runs import (
    Recorded,
    fill_quickstart,
    quickstart_cells,
    record_run,
    resolved_run,
    write_plan,
)

from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from reports.comparisons.compare import compare
from reports.comparisons.comparison_text import to_data, to_markdown, to_terminal


@pytest.fixture
def two_sweeps(store):
    fill_quickstart(store, "before")
    fill_quickstart(store, "after", speed=0.9, seed=1)
    return store


def one_cell_sweep(store, sweep, resolved, **changes):
    write_plan(store, [("only", resolved)], sweep=sweep)
    return record_run(store, Recorded(resolved, cell="only", sweep=sweep, **changes))


def test_equal_sweeps_match_cell_by_cell(two_sweeps):
    comparison = compare(two_sweeps, "before", "after")
    assert len(comparison.changes) == 12
    assert comparison.unmatched_base == comparison.unmatched_head == ()
    assert comparison.set_aside == ()
    for change in comparison.changes:
        assert change.throughput_ratio == pytest.approx(1 / 0.9, rel=0.1)


def test_the_axis_in_which_two_sweeps_differ_is_found_and_set_aside(store):
    for sweep, comm in (("fp32-comm", "fp32"), ("bf16-comm", "bf16")):
        cells = [(s, resolved_run("mfsdp", s, comm=comm)) for s in ("optim", "optim_grads")]
        write_plan(store, cells, sweep=sweep)
        for name, resolved in cells:
            record_run(store, Recorded(resolved, cell=name, sweep=sweep))
    comparison = compare(store, "fp32-comm", "bf16-comm")
    assert comparison.set_aside == ("dtypes.grad_comm",)
    assert comparison.labels == ("optim", "optim_grads")


def test_a_named_axis_is_set_aside_within_one_sweep(two_sweeps):
    with pytest.raises(NotComparableError, match="--ignore"):
        compare(two_sweeps, "before", "after", ignore=["dtypes"])  # two cells for every key
    comparison = compare(two_sweeps, "before:ddp-fp32", "before:ddp-bf16")
    assert comparison.labels == ("ddp-fp32 -> ddp-bf16",)
    assert comparison.differences == (
        "dtypes.compute: fp32, bf16",
        "dtypes.grad_comm: fp32, bf16",
    )


def test_cells_without_a_partner_are_listed(two_sweeps):
    cells = [*quickstart_cells()[:2], ("extra", resolved_run(ranks=4))]
    write_plan(two_sweeps, cells, sweep="partly")
    for name, resolved in cells:
        record_run(two_sweeps, Recorded(resolved, cell=name, sweep="partly"))
    comparison = compare(two_sweeps, "before", "partly")
    assert comparison.labels == ("ddp-fp32", "ddp-bf16")
    assert len(comparison.unmatched_base) == 10
    assert comparison.unmatched_head == ("extra",)


def test_two_runs_can_be_compared_by_parts_of_their_ids(store):
    first = one_cell_sweep(store, "a", resolved_run("ddp", "no_shard"))
    second = one_cell_sweep(store, "b", resolved_run("mfsdp", "optim"), speed=0.5)
    comparison = compare(store, first.run_id, second.run_id[-12:])
    assert len(comparison.changes) == 1
    assert any(text.startswith("engine.name: ddp, mfsdp") for text in comparison.differences)


def test_runs_with_other_limits_only_are_of_equal_configuration(store):
    resolved = resolved_run()
    launch = resolved.launch.model_copy(update={"timeout_seconds": 1.0})
    one_cell_sweep(store, "a", resolved)
    one_cell_sweep(store, "b", resolved.model_copy(update={"launch": launch}))
    assert compare(store, "a", "b").differences == ()


def test_other_hardware_everywhere_is_not_comparable(store):
    one_cell_sweep(store, "a", resolved_run())
    one_cell_sweep(store, "b", resolved_run(), environment={"cpu_name": "Another CPU"})
    with pytest.raises(NotComparableError, match=r"hardware differs: Example.*Another CPU") as info:
        compare(store, "a", "b")
    assert info.value.exit_code == 5


def test_another_host_of_the_same_hardware_is_comparable(store):
    one_cell_sweep(store, "a", resolved_run())
    one_cell_sweep(store, "b", resolved_run(), environment={"hostname": "other-node"})
    assert len(compare(store, "a", "b").changes) == 1


def test_one_incomparable_cell_is_listed_and_the_others_compared(store):
    fill_quickstart(store, "before")
    cells = quickstart_cells()
    write_plan(store, cells, sweep="after")
    for index, (name, resolved) in enumerate(cells):
        environment = {"cpu_count": 64} if index == 0 else {}
        record_run(store, Recorded(resolved, cell=name, sweep="after", environment=environment))
    comparison = compare(store, "before", "after")
    assert len(comparison.changes) == 11
    assert [name for name, _ in comparison.not_comparable] == ["ddp-fp32"]


def test_records_of_another_schema_are_not_comparable(store):
    one_cell_sweep(store, "a", resolved_run())
    folder = one_cell_sweep(store, "b", resolved_run())
    status = json.loads((folder.path / "status.json").read_text())
    (folder.path / "status.json").write_text(json.dumps({**status, "schema_version": 0}))
    with pytest.raises(NotComparableError, match="schema versions differ: 1 and 0"):
        compare(store, "a", "b")


def test_a_side_that_only_failed_is_nothing_measured(store):
    one_cell_sweep(store, "a", resolved_run())
    one_cell_sweep(store, "b", resolved_run(), state="crashed")
    with pytest.raises(NothingMeasuredError, match="b has no finished run") as info:
        compare(store, "a", "b")
    assert info.value.exit_code == 3


@pytest.mark.parametrize("name", ["nothing", "a:nothing", "nothing:only"])
def test_a_name_that_is_nothing_is_a_usage_error(store, name):
    one_cell_sweep(store, "a", resolved_run())
    with pytest.raises(UsageError) as info:
        compare(store, "a", name)
    assert info.value.exit_code == 2


def test_every_rendering_names_the_three_numbers_of_speed_and_n_1(two_sweeps):
    comparison = compare(two_sweeps, "before", "after")
    for text in (to_terminal(comparison), to_markdown(comparison)):
        for words in ("time change", "throughput change", "throughput ratio", "n=1, no interval"):
            assert words in text
    data = json.loads(json.dumps(to_data(comparison)))
    assert data["changes"][0].keys() >= {"time_change", "throughput_change", "throughput_ratio"}
    assert data["changes"][0]["base_n"] == 1


def test_terminal_columns_are_aligned(two_sweeps):
    lines = to_terminal(compare(two_sweeps, "before", "after")).splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("  ----"))
    ends = [len(lines[rule][: lines[rule].index("  ", 2)])]
    for line in lines[rule + 1 : rule + 13]:
        assert line[ends[0] : ends[0] + 2] == "  "
