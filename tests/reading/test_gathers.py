"""A run that asked for low-precision gathers and did not get them says so in the headline."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, findings_of, resolved_run

from bench.derive.gathers import broken_promise
from bench.spec import EngineSpec
from reports.renderers.document import Paragraph
from reports.sections.what_ran import what_ran

CODES = {"uint8": 9000, "bfloat16": 100}
WIDE = {"bfloat16": 18000}


def recorded(store, gathered, **engine):
    """What a report finds of one run."""
    spec = EngineSpec(name="mfsdp", strategy="optim_grads_params", **engine)
    resolved = resolved_run(dtype="bf16", engine=spec.name).model_copy(update={"engine": spec})
    runtime = {"python": "3.11.8", "torch": "2.13.0", "device_names": []}
    if gathered is not None:
        runtime["gathered_bytes"] = gathered
    return findings_of(store, {"one": Recorded(resolved, environment={"runtime": runtime})})


def warnings(found) -> list[str]:
    blocks = what_ran(found).blocks
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
    found = recorded(store, gathered, recipe="current")
    assert [says in text and text.startswith("one: ") for text in warnings(found)] == [True]
    run = found.cells[0].finished[0]
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
    found = recorded(store, gathered, **engine)
    assert not warnings(found)
    assert broken_promise(found.cells[0].finished[0].record) is None
