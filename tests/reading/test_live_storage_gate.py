"""Live storage is judged to the byte, beside a ledger that may not know of it."""

from __future__ import annotations

from typing import Any

import pytest
from gate_runs import CELLS, Arm, record_arms

from bench.derive.live_storage import LiveRow, LiveStorage
from reports.gates.gate import GateResult, gate
from reports.gates.pairing import sides_of_arms
from reports.gates.policy import Policy

BUFFERS = LiveRow(site="mfsdp_core/memory/a.py:acquire", line=7, bytes=8_000, storages=4)
TABLES = LiveRow(site="bench/models/rotary.py:f", line=1, bytes=600, storages=1, of_harness=True)
KEPT = LiveRow(site="mfsdp_core/runtime/b.py:adopt", line=161, bytes=2048, storages=2)


def live(*rows: LiveRow, ledger: int | None = 4_000) -> dict[str, Any]:
    size = sum(row.bytes for row in rows) // 2
    ledgers = None if ledger is None else (ledger, ledger)
    found = LiveStorage(step=2, bytes=(size, size), ledger_bytes=ledgers, rows=rows)
    return found.model_dump(mode="json")


BASE = live(BUFFERS, TABLES)


def judged(store, head: Any, base: Any = BASE) -> GateResult:
    arms = {"base": Arm(live=base), "head": Arm(live=head)}
    record_arms(store, arms, blocks=1, cells={"zero3": CELLS["zero3"]})
    return gate(sides_of_arms(store, "gate", None, None), Policy(), lambda _: None)


def verdicts(result: GateResult) -> dict[str, str]:
    wanted = ("live_storage", "ledger_difference")
    return {one.metric: one.verdict for one in result.judgements if one.metric in wanted}


def test_equal_storage_is_equivalent(store):
    found = verdicts(judged(store, BASE))
    assert found == {"live_storage": "equivalent", "ledger_difference": "equivalent"}


def test_storage_that_no_ledger_knows_of_fails_with_its_maker(store):
    result = judged(store, live(BUFFERS, TABLES, KEPT))
    reasons = {one.metric: one.reason for one in result.of("regressed")}
    where = "over all ranks +2.0 KiB from mfsdp_core/runtime/b.py:adopt line 161"
    assert reasons == {"live_storage": where, "ledger_difference": where}


def test_a_ledger_that_forgets_fails_though_storage_is_equal(store):
    found = verdicts(judged(store, live(BUFFERS, TABLES, ledger=3_000)))
    assert found == {"live_storage": "equivalent", "ledger_difference": "regressed"}


def test_an_engine_without_a_ledger_has_its_storage_judged_alone(store):
    without = live(BUFFERS, TABLES, ledger=None)
    assert verdicts(judged(store, without, without)) == {"live_storage": "equivalent"}


def test_older_records_say_nothing_of_it_and_are_not_asked(store):
    result = judged(store, None, None)
    assert verdicts(result) == {}
    assert not result.failed


@pytest.mark.parametrize("damaged", ["text", {"step": 2, "bytes": []}, {"step": 2}])
def test_damaged_accounts_are_none(store, damaged):
    assert verdicts(judged(store, damaged, damaged)) == {}
