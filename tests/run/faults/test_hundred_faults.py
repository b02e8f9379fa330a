"""Every fault of the table, one at a time: what its record says, and that nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hundred_faults import Fault, faults, inject

from bench.store import ResultsStore

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(300)]

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.kind}: {fault.name}")
def test_a_fault_is_one_record_that_names_its_cause(
    store: ResultsStore, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    assert inject(store, fault).problems == []
