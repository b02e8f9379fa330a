"""The choice of the cell that others are compared with."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, quickstart_cells, record_run, resolved_run, write_plan

from bench.errors import UsageError
from bench.store import ResultsStore
from reports.views.reference import choose_reference, rule_for
from reports.views.sweep_view import load_sweeps


@pytest.fixture
def cells(quickstart_root):
    return load_sweeps(ResultsStore.open(quickstart_root, create=False), ["quickstart"])[0].cells


def usable(cell):
    return cell.n > 0


def test_ddp_with_the_widest_dtypes_is_preferred_wherever_it_stands(cells):
    assert choose_reference(list(reversed(cells)), None, usable).name == "ddp-fp32"


def test_without_ddp_the_next_engine_in_the_stated_order_is_taken(cells):
    rest = [cell for cell in cells if cell.resolved.engine.name != "ddp"]
    assert choose_reference(rest, None, usable).name == "fsdp2-fp32"


def test_the_rule_names_the_engines_that_are_there_in_their_order(cells):
    assert ", then the engines in the order ddp, fsdp2, mfsdp, then the fewest" in rule_for(cells)
    assert "engines" not in rule_for(cells[:1])


def test_wide_dtypes_outrank_the_engine(cells):
    rest = [c for c in cells if c.name in ("ddp-bf16", "mfsdp-optim-fp32")]
    assert choose_reference(rest, None, usable).name == "mfsdp-optim-fp32"


def test_a_named_cell_is_taken(cells):
    assert choose_reference(cells, "mfsdp-optim-bf16", usable).name == "mfsdp-optim-bf16"


def test_an_unknown_name_is_refused_with_the_known_ones(cells):
    with pytest.raises(UsageError, match=r"'nope'.*ddp-fp32"):
        choose_reference(cells, "nope", usable)


def test_a_named_cell_without_a_number_is_refused(store):
    resolved = resolved_run()
    write_plan(store, [("only", resolved)])
    record_run(store, Recorded(resolved, cell="only", state="crashed"))
    cells = load_sweeps(store, ["quickstart"])[0].cells
    with pytest.raises(UsageError, match="no finished"):
        choose_reference(cells, "only", usable)
    assert choose_reference(cells, None, usable) is None


def test_the_choice_does_not_depend_on_the_order_of_unequal_cells(cells):
    assert len(quickstart_cells()) == len(cells)
    assert choose_reference(cells, None, usable) is choose_reference(
        sorted(cells, key=lambda cell: cell.name, reverse=True), None, usable
    )
