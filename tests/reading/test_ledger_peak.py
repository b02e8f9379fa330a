"""A total of memory is a peak that existed at one moment, and main weights are main everywhere."""

from __future__ import annotations

from recorded_runs import Recorded, findings_of, resolved_run

from bench.derive.metrics import LEDGER_PEAK
from bench.derive.timeline import ledger_peak, peak, read_timeline
from reports.build import build_document
from reports.comparisons.change import change_between, memory_metric
from reports.renderers.document import TableBlock

MIB = 2**20


def change(at: float, category: str, mib: float) -> dict:
    return {"milliseconds": at, "category": category, "bytes": int(mib * MIB)}


def memory(compute: float, buffers: float, *, together: bool) -> dict:
    """10 MiB last; `compute` and `buffers` are held at once, or one after the other."""
    changes = [change(1, "compute_weights", compute)]
    if not together:
        changes.append(change(2, "compute_weights", -compute))
    changes.append(change(3, "communication_buffers", buffers))
    highest = {"main_weights": 10, "compute_weights": compute, "communication_buffers": buffers}
    return {
        "rank": 0,
        "by_category_bytes": {name: int(mib * MIB) for name, mib in highest.items()},
        "timeline": {
            "step": 2,
            "milliseconds": 9.0,
            "start": [change(0, "main_weights", 10)],
            "changes": changes,
        },
    }


SHARED_COPY = {
    "rank": 0,
    "by_category_bytes": {"main_weights": 6 * MIB, "compute_weights": 2 * MIB},
    "timeline": {
        "step": 2,
        "milliseconds": 9.0,
        "start": [change(0, "compute_weights", 8)],
        "changes": [],
    },
}


def recorded(store, documents: dict[str, dict]):
    """A cell per document, each with its `memory.json`."""
    run = resolved_run()
    cells = {}
    for number, (name, document) in enumerate(documents.items()):
        train = run.train.model_copy(update={"seed": number})
        cells[name] = Recorded(run.model_copy(update={"train": train}), memory=document)
    return findings_of(store, cells)


def test_the_ledger_peak_is_of_one_moment_and_ranks_cells_as_the_timeline_does(store) -> None:
    apart = memory(8, 4, together=False)  # 22 MiB if peaks are added, 18 at one moment
    at_once = memory(6, 4, together=True)  # 20 MiB either way
    findings = recorded(store, {"apart": apart, "at_once": at_once})
    one, other = findings.cells
    assert [cell.value(LEDGER_PEAK) for cell in (one, other)] == [18 * MIB, 20 * MIB]
    assert memory_metric([one, other]) is LEDGER_PEAK
    assert (change_between(other, one).memory_change or 0) < 0
    assert one.ledger == {"main_weights": 10 * MIB, "compute_weights": 8 * MIB}
    assert one.ledger_is_measured


def test_bars_timeline_and_table_attribute_a_shared_copy_alike(store) -> None:
    findings = recorded(store, {"optim": SHARED_COPY})
    (cell,) = findings.cells
    expected = {"main_weights": 6 * MIB, "compute_weights": 2 * MIB}
    timeline = read_timeline(SHARED_COPY)
    assert timeline is not None
    assert dict(peak(timeline).moment.by_category) == expected
    assert cell.ledger == expected
    sections = {section.anchor: section for section in build_document(findings).sections}
    tables = [b.table for b in sections["memory"].blocks if isinstance(b, TableBlock)]
    assert tables[0].rows[0].cells[-2:] == ("6.0 MiB", "2.0 MiB")


def test_what_is_recorded_counts_before_what_is_derived() -> None:
    document = memory(8, 4, together=False)
    by_category = {"main_weights": 3, "gradients": 4}
    recorded_peak = {"step": 2, "peak_bytes": 7, "by_category_bytes": by_category}
    found = ledger_peak(document | {"ledger": recorded_peak})
    assert (found.peak_bytes, found.by_category, found.is_measured) == (7, by_category, True)
    damaged = ledger_peak(document | {"ledger": recorded_peak | {"peak_bytes": 8}})
    assert damaged.peak_bytes == 18 * MIB


def test_without_a_timeline_the_sum_is_called_an_upper_bound_and_activations_have_none() -> None:
    highest = {"main_weights": 3, "gradients": 4}
    found = ledger_peak({"by_category_bytes": highest})
    assert (found.peak_bytes, found.is_measured) == (7, False)
    profiled = ledger_peak({"by_category_bytes": highest | {"activations": 5}})
    assert (profiled.peak_bytes, profiled.is_measured) == (None, False)
    assert ledger_peak(None).peak_bytes is None
    former = {"by_category_bytes": {"main_weights": 3, "optimizer_state": 6}}
    assert ledger_peak(former).peak_bytes is None
    partly = {"by_category_bytes": highest | {"communication_buffers": None}}
    found = ledger_peak(partly)
    assert (found.peak_bytes, found.by_category) == (None, highest)
