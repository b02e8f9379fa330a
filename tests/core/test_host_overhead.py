"""Host overhead of hooks and schedule beside FSDP2's, on torch's fake process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "host_overhead.py"


@pytest.fixture(scope="module")
def measured() -> dict[int, dict[str, Any]]:
    """What the script counts, by number of units."""
    found = {}
    for units in (8, 32):
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--json", "--rounds", "1"]
        done = subprocess.run(
            [*command, "--units", str(units)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found[units] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("case", "most"), [("zero3", 0.27), ("recompute", 0.288), ("hsdp", 0.292)])
def test_a_unit_costs_the_host_less_than_three_tenths_of_the_calls_of_fsdp2(
    measured, case, most
) -> None:
    found = measured[8][case]
    assert found["mfsdp"]["calls"] > 50  # it was there at all
    assert found["ratio"]["calls"] <= most


@pytest.mark.parametrize("case", ["zero3", "recompute", "hsdp"])
def test_a_unit_of_many_costs_no_more_calls_than_a_unit_of_few(measured, case) -> None:
    assert measured[32][case]["mfsdp"]["calls"] <= measured[8][case]["mfsdp"]["calls"]
