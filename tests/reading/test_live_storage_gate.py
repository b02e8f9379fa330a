"""Live storage is judged to the byte, beside a ledger that may not know of it."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_runs import ONE, Arm, judged_arms

from bench.derive.live_storage import LiveRow, LiveStorage
from reports.gates.gate import GateResult

BUFFERS = LiveRow(site="mfsdp_core/memory/a.py:acquire", line=7, bytes=8_000, storages=4)
TABLES = LiveRow(site="bench/models/rotary.py:f", line=1, bytes=600, storages=1, of_harness=True)
KEPT = LiveRow(site="mfsdp_core/runtime/b.py:adopt", line=161, bytes=2048, storages=2)


def live(*rows: LiveRow, ledger: int | None = 4_000) -> dict[str, Any]:
    size = sum(row.bytes for row in rows) // 2
    ledgers = None if ledger is None else (ledger, ledger)
    found = LiveStorage(step=2, bytes=(size, size), ledger_bytes=ledgers, rows=rows)
    return found.model_dump(mode="json")


BASE = live(BUFFERS, TABLES)
WITHOUT = live(BUFFERS, TABLES, ledger=None)


def judged(store, head: Any, base: Any = BASE) -> GateResult:
    return judged_arms(store, None, Arm(live=base), live=head, blocks=1, cells=ONE)


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        (BASE, BASE, {"live_storage": "equivalent", "ledger_difference": "equivalent"}),
        # A ledger that forgets fails though storage is equal.
        (
            BASE,
            live(BUFFERS, TABLES, ledger=3_000),
            {"live_storage": "equivalent", "ledger_difference": "regressed"},
        ),
        (WITHOUT, WITHOUT, {"live_storage": "equivalent"}),  # an engine without a ledger
        # Older records say nothing of it and are not asked; damaged accounts are none.
        *((none, none, {}) for none in (None, "text", {"step": 2, "bytes": []}, {"step": 2})),
    ],
)
def test_storage_and_the_ledger_are_judged_to_the_byte(store, base, head, expected):
    result = judged(store, head, base)
    wanted = ("live_storage", "ledger_difference")
    found = {one.metric: one.verdict for one in result.judgements if one.metric in wanted}
    assert found == expected
    assert not result.failed


def test_storage_that_no_ledger_knows_of_fails_with_its_maker(store):
    result = judged(store, live(BUFFERS, TABLES, KEPT))
    reasons = {one.metric: one.reason for one in result.of("regressed")}
    where = "over all ranks +2.0 KiB from mfsdp_core/runtime/b.py:adopt line 161"
    assert reasons == {"live_storage": where, "ledger_difference": where}
