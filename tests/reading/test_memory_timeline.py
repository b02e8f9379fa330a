"""From the changes of a step to its peak, which existed at one moment, its figure and tables."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from recorded_runs import Recorded, findings_of, ledger, resolved_run

from bench.derive.metrics import LEDGER_PEAK
from bench.derive.timeline import Moment, ledger_peak, moments, peak, read_timeline
from bench.meters.memory_timeline import attributed
from bench.record import MemoryTimeline
from bench.resolve.presets import PRESETS
from bench.store import ResultsStore
from reports.build import build_document
from reports.compare.change import Change, memory_metric
from reports.findings import Findings
from reports.plots.memory import MOST_TIMELINES, memory_timeline_figure
from reports.renderers.document import Figure, Section, TableBlock
from reports.sections.memory import unit_name, unit_names

HYBRID = PRESETS["hybrid-tiny"]
MIB = 2**20


def change(at: float, category: str, mib: float, bucket: str = "", **more) -> dict:
    size = {"bytes": int(mib * MIB)}
    return {"milliseconds": at, "category": category, "bucket": bucket, **size, **more}


def gather(at: float, mib: float, layer: int, **more) -> dict:
    role = "compute_weights"
    return change(at, "compute_weights", mib, f"layers.{layer}/0", role=role, **more)


DOCUMENT = {
    "step": 2,
    "milliseconds": 100.0,
    "start": [change(0, "main_weights", 10, "(root)/0", role="main_weights")],
    "changes": [
        gather(10, 4, 0),
        gather(20, 2, 1),
        gather(30, -4, 0),
        change(40, "communication_buffers", 3, "layers.1/0", role="grad_bucket"),
        change(50, "communication_buffers", -3, "layers.1/0", role="grad_bucket"),
        gather(60, -2, 1),
    ],
    "marks": [[1.0, "microbatch 1"], [90.0, "update"]],
}
POOLED = {
    "step": 2,
    "milliseconds": 10.0,
    "start": [change(0, "compute_weights", 8, "(pool)", role="compute_weights")],
    "changes": [
        gather(at, mib, layer, in_pool=True)
        for at, mib, layer in ((1, 4, 0), (2, 3, 1), (3, -4, 0))
    ],
}
PLAN = {
    "pools": [
        {
            "role": "compute_weights",
            "slots": 2,
            "areas": [{"role": "compute_weights", "dtype": "float32", "bytes": 4 * MIB}],
            "offsets": [0],
        }
    ],
    "units": [
        {
            "role": "compute_weights",
            "unit": f"layers.{place}",
            "bucket": f"layers.{place}/0",
            "dtype": "float32",
            "bytes": size * MIB,
            "padding_bytes": MIB // 4,
            "placement": "pool",
            "slot": place % 2,
            "offset_bytes": 0,
            "waste_bytes": (4 - size) * MIB,
        }
        for place, size in enumerate((1, 4, 1))
    ],
}


def test_the_peak_is_the_moment_with_the_most_bytes_and_names_what_is_alive():
    series = moments(MemoryTimeline.model_validate(DOCUMENT))
    assert [m.total_bytes // MIB for m in series] == [10, 14, 16, 12, 15, 12, 10]
    found = peak(MemoryTimeline.model_validate(DOCUMENT))
    assert (found.moment.milliseconds, found.moment.total_bytes) == (20.0, 16 * MIB)
    assert [(h.unit, h.role, h.bytes // MIB) for h in found.alive] == [
        ("(root)", "main_weights", 10),
        ("layers.0", "compute_weights", 4),
        ("layers.1", "compute_weights", 2),
    ]


def test_slots_in_use_do_not_add_to_the_pool_and_decide_between_equal_moments():
    timeline = MemoryTimeline.model_validate(POOLED)
    assert [(m.total_bytes // MIB, m.idle_bytes // MIB) for m in moments(timeline)] == [
        (8, 8),
        (8, 4),
        (8, 1),
        (8, 5),
    ]
    found = peak(timeline)
    assert found.moment.milliseconds == 2.0
    assert [h.unit for h in found.alive if h.in_pool] == ["layers.0", "layers.1"]


def test_a_timeline_that_is_damaged_is_none_and_a_step_without_changes_is_flat():
    for damaged in (None, {}, {"timeline": None}, {"timeline": "cut"}, {"timeline": {"step": 2}}):
        assert read_timeline(damaged) is None
    timeline = MemoryTimeline.model_validate({**DOCUMENT, "changes": [], "start": []})
    assert peak(timeline).moment == Moment(0.0, {})


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["layers.0", "layers.2"], "layers.0, 2 (Mamba-2)"),
        (["layers.3"], "layers.3 (attention)"),
        (["layers.0", "layers.1"], "layers.0 (Mamba-2), layers.1 (experts)"),
        (["(root)"], "root"),
        (["encoder.x", "layers.3"], "encoder.x, layers.3 (attention)"),
        (["layers.99"], "layers.99"),
    ],
)
def test_units_of_a_hybrid_are_named_with_their_kind(units, words):
    assert unit_names(units, HYBRID) == words


def test_many_units_of_a_llama_are_named_by_number():
    names = unit_names([f"layers.{i}" for i in range(32)], PRESETS["llama3-8b"])
    assert names == "layers.0, 1, 2, 3, 4, ... 31: 32 units"
    assert unit_name("layers.4", PRESETS["llama3-8b"]) == "layers.4"


def found_in(store: ResultsStore, documents: dict[str, dict]) -> Findings:
    """Of one cell per document, each with its `memory.json`."""
    run = resolved_run(shape=HYBRID)
    cells = {}
    for number, (name, document) in enumerate(documents.items()):
        train = run.train.model_copy(update={"seed": number})
        memory = {"rank": 0, "by_category_bytes": ledger(run), **document}
        cells[name] = Recorded(run.model_copy(update={"train": train}), memory=memory)
    return findings_of(store, cells)


def section_of(findings: Findings) -> Section | None:
    sections = build_document(findings).sections
    return next((section for section in sections if section.anchor == "memory"), None)


def memory_section(store: ResultsStore, documents: dict[str, dict]) -> Section | None:
    return section_of(found_in(store, documents))


def rows_of(section, title: str) -> list[tuple[str, ...]]:
    tables = [b.table for b in section.blocks if isinstance(b, TableBlock)]
    (table,) = [t for t in tables if title in {c.title for c in t.columns}]
    return [row.cells for row in table.rows]


def test_the_report_draws_the_step_and_says_what_was_alive_at_the_peak(store):
    section = memory_section(store, {"plain": {"timeline": DOCUMENT}, "none": {}})
    (figure,) = [b for b in section.blocks if isinstance(b, Figure)]
    ET.fromstring(figure.svg)
    (row,) = rows_of(section, "gathered at once")
    assert row[0] == "plain"
    assert "layers.0 (Mamba-2) 4.0 MiB, layers.1 (experts) 2.0 MiB" in row[1]
    assert row[2] == "16.0 MiB"
    assert any("none" in getattr(b, "text", "") for b in section.blocks)


def test_the_report_says_who_made_live_storage(store):
    live = {
        "step": 2,
        "bytes": [3 * 2**20, 2**20],
        "rows": [
            {"site": "mfsdp_core/a.py:keep", "line": 5, "bytes": 3 * 2**20, "storages": 2},
            {"site": "bench/b.py:f", "bytes": 2**20, "storages": 1},
        ],
    }
    section = memory_section(store, {"kept": {"live": live}, "none": {}})
    (row,) = rows_of(section, "live")
    makers = "mfsdp_core/a.py:keep 1.5 MiB, bench/b.py:f 512.0 KiB"
    assert row == ("kept", makers, "2.0 MiB")


def test_the_report_lists_padding_waste_and_the_plan_of_the_pool(store):
    section = memory_section(store, {"pooled": {"timeline": POOLED, "pool_plan": PLAN}})
    padding = rows_of(section, "padding")
    assert padding[0][:5] == ("layers.0, 2 (Mamba-2)", "weights", "float32", "pool", "all")
    assert padding[0][5:] == ("1.0 MiB", "256.0 KiB", "25.00 %", "3.0 MiB")
    assert padding[1][0] == "layers.1 (experts)"
    assert padding[1][-1] == "0 B"
    (area,) = rows_of(section, "sized by")
    assert area[2] == "layers.1 (experts)"
    assert area[4:] == ("2", "4.0 MiB", "8.0 MiB", "3", "50.0 %")


def test_a_damaged_plan_or_timeline_costs_the_report_its_section_and_nothing_else(store):
    odd = {"timeline": {"step": "x"}, "pool_plan": {"units": 3}}
    assert memory_section(store, {"odd": odd}) is None


def test_a_figure_of_many_cells_and_changes_stays_one_readable_page():
    long = {**DOCUMENT, "changes": DOCUMENT["changes"] * 3000}
    shown = [(f"cell-{i}", MemoryTimeline.model_validate(long)) for i in range(2)]
    shown += [(f"c{i}", MemoryTimeline.model_validate(POOLED)) for i in range(MOST_TIMELINES)]
    text = memory_timeline_figure(shown)
    ET.fromstring(text)
    assert len(text) < 3_000_000


def memory(compute: float, buffers: float, *, together: bool) -> dict:
    """10 MiB last; `compute` and `buffers` are held at once, or one after the other."""
    changes = [change(1, "compute_weights", compute)]
    if not together:
        changes.append(change(2, "compute_weights", -compute))
    changes.append(change(3, "communication_buffers", buffers))
    highest = {"main_weights": 10, "compute_weights": compute, "communication_buffers": buffers}
    by_category = {name: int(mib * MIB) for name, mib in highest.items()}
    document = {"timeline": step([("main_weights", 10)], changes)}
    held = dict(peak(read_timeline(document)).moment.by_category)
    ledger = {"step": 2, "peak_bytes": sum(held.values()), "by_category_bytes": held}
    return document | {"by_category_bytes": by_category, "ledger": ledger}


def step(start: list[tuple[str, float]], changes: list[dict]) -> dict:
    held = [change(0, *one) for one in start]
    return {"step": 2, "milliseconds": 9.0, "start": held, "changes": changes}


def test_the_ledger_peak_is_of_one_moment_and_ranks_cells_as_the_timeline_does(store) -> None:
    apart = memory(8, 4, together=False)  # 22 MiB if peaks are added, 18 at one moment
    at_once = memory(6, 4, together=True)  # 20 MiB either way
    findings = found_in(store, {"apart": apart, "at_once": at_once})
    one, other = findings.cells
    assert [cell.value(LEDGER_PEAK) for cell in (one, other)] == [18 * MIB, 20 * MIB]
    assert memory_metric([one, other]) is LEDGER_PEAK
    assert (Change(other, one).memory_change or 0) < 0
    assert one.ledger == {"main_weights": 10 * MIB, "compute_weights": 8 * MIB}
    assert one.ledger_is_measured


def test_bars_timeline_and_table_attribute_a_shared_copy_alike(store) -> None:
    expected = {"main_weights": 6 * MIB, "compute_weights": 2 * MIB}
    recorded = MemoryTimeline.model_validate(step([("compute_weights", 8)], []))
    timeline = attributed(recorded, expected)
    assert dict(peak(timeline).moment.by_category) == expected
    assert attributed(timeline, expected) == timeline
    shared = {"by_category_bytes": expected, "timeline": timeline.model_dump(mode="json")}
    findings = found_in(store, {"optim": shared})
    assert findings.cells[0].ledger == expected
    tables = [b.table for b in section_of(findings).blocks if isinstance(b, TableBlock)]
    assert tables[0].rows[0].cells[-2:] == ("6.0 MiB", "2.0 MiB")


HIGHEST = {"main_weights": 3, "gradients": 4}
RECORDED = {"step": 2, "peak_bytes": 7, "by_category_bytes": HIGHEST}
APART = memory(8, 4, together=False)


@pytest.mark.parametrize(
    ("document", "peak_bytes", "by_category", "is_measured"),
    [
        (APART | {"ledger": RECORDED}, 7, HIGHEST, True),
        # Without a ledger, or with a damaged one, the sum is an upper bound; activations have none.
        (APART | {"ledger": RECORDED | {"peak_bytes": 8}}, 22 * MIB, None, False),
        ({"by_category_bytes": HIGHEST}, 7, HIGHEST, False),
        ({"by_category_bytes": HIGHEST | {"activations": 5}}, None, None, False),
        (
            *({"by_category_bytes": HIGHEST | {"communication_buffers": None}}, None),
            *(HIGHEST, False),
        ),
        (None, None, None, False),
    ],
)
def test_a_peak_is_recorded_or_an_upper_bound(
    document, peak_bytes, by_category, is_measured
) -> None:
    found = ledger_peak(document)
    assert (found.peak_bytes, found.is_measured) == (peak_bytes, is_measured)
    assert by_category in (None, found.by_category)
