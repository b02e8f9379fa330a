"""A run that asked for low-precision gathers and did not get them says so in the headline."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, record_run, resolved_run, write_plan

from bench.derive.gathers import broken_promise
from bench.spec import EngineSpec
from reports.findings import find
from reports.renderers.document import Paragraph
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps

CODES = {"uint8": 9000, "bfloat16": 100}
WIDE = {"bfloat16": 18000}


def recorded(store, gathered, **engine):
    """The record of one run, read back."""
    spec = EngineSpec(name="mfsdp", strategy="optim_grads_params", **engine)
    resolved = resolved_run(dtype="bf16", engine=spec.name).model_copy(update={"engine": spec})
    write_plan(store, [("one", resolved)])
    runtime = {"python": "3.11.8", "torch": "2.13.0", "device_names": []}
    if gathered is not None:
        runtime["gathered_bytes"] = gathered
    record_run(store, Recorded(resolved, cell="one", environment={"runtime": runtime}))
    (view,) = load_sweeps(store, ["quickstart"])
    return view


def warnings(view) -> list[str]:
    blocks = what_ran(find([view])).blocks
    return [b.text for b in blocks if isinstance(b, Paragraph) and b.tone == "warning"]


@pytest.mark.parametrize(
    ("gathered", "says"),
    [
        (WIDE, "did not get them: 100 % bfloat16 on the wire"),
        (None, "the record does not say what was gathered"),
        ({}, "the record does not say what was gathered"),
    ],
)
def test_a_broken_promise_is_in_the_headline(store, gathered, says) -> None:
    view = recorded(store, gathered, recipe="current")
    assert [says in text and text.startswith("one: ") for text in warnings(view)] == [True]
    run = view.cells[0].finished[0]
    assert any(says in note for note in run.summary.notes)


@pytest.mark.parametrize(
    ("gathered", "engine"),
    [
        (CODES, {"recipe": "mxfp8"}),
        (WIDE, {"recipe": "current", "gather_precision": "compute"}),
        (WIDE, {}),
        (None, {}),
    ],
)
def test_a_promise_that_was_kept_or_never_made_is_not(store, gathered, engine) -> None:
    view = recorded(store, gathered, **engine)
    assert not warnings(view)
    assert broken_promise(view.cells[0].finished[0].record) is None
