"""Headlines compare like with like."""

from __future__ import annotations

from recorded_runs import Recorded, fill_quickstart, record_run, resolved_run, write_plan

from reports.findings import find
from reports.renderers.document import Bullets
from reports.sections.headline import headline
from reports.views.sweep_view import load_sweeps


def sentences(store, reference: str | None = None) -> list[str]:
    section = headline(find(load_sweeps(store, ["quickstart"]), reference))
    (bullets,) = [block for block in section.blocks if isinstance(block, Bullets)]
    return [text for _, text in bullets.items]


def test_each_dtype_policy_is_compared_with_its_own_reference(store) -> None:
    fill_quickstart(store)
    fp32, bf16 = sentences(store)[:2]
    assert fp32.startswith("fp32: No cell had a higher throughput than the reference ddp-fp32;")
    assert bf16.startswith("bf16, main fp32, ")
    assert "ddp-bf16" in bf16
    assert "ddp-fp32" not in bf16


def test_different_numbers_of_ranks_are_not_compared(store) -> None:
    cells = [("two", resolved_run("ddp", "no_shard")), ("four", resolved_run("mfsdp", ranks=4))]
    cells.append(("two too", resolved_run("mfsdp")))
    write_plan(store, cells)
    for name, resolved in cells:
        record_run(store, Recorded(resolved, cell=name, speed=0.5 if name == "four" else 1.0))
    assert not any("throughput: four" in text for text in sentences(store))
    assert "two too" in sentences(store)[0]


def test_across_policies_a_sentence_names_them(store) -> None:
    cells = [
        ("wide", resolved_run("ddp", "no_shard")),
        ("narrow", resolved_run("ddp", "no_shard", dtype="bf16", comm="bf16")),
    ]
    write_plan(store, cells)
    for name, resolved in cells:
        record_run(store, Recorded(resolved, cell=name))
    text = sentences(store)[0]
    assert text.startswith("Highest throughput: narrow, against the reference wide")
    assert "of another dtype policy (bf16, main fp32, comm bf16 against fp32)" in text
    assert sentences(store, "wide")[0] == text
