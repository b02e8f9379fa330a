"""Host overhead of hooks and schedule beside FSDP2's, on torch's fake process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "host_overhead.py"


def test_a_unit_costs_the_host_at_most_half_the_calls_of_fsdp2() -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    options = ["--json", "--units", "8", "--rounds", "1"]
    done = subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mfsdp"]["calls"] > 50  # it was there at all
    assert found["ratio"]["calls"] <= 0.5
