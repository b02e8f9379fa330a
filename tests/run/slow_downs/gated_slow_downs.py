"""Which metric of a gate finds which slow-down.

Every patch of this folder puts one into a copy of the core. The copies and an unchanged one are
arms of one sweep, one run each, and each is gated against the base.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bug_in_a_copy import copy_of_core

HERE = Path(__file__).parent
UNCHANGED = "unchanged"
_ARMS_PER_SWEEP = 7
"""Beside the base: a sweep may have eight."""


def slow_downs() -> dict[str, str]:
    """Name -> what it does, as the first line of its patch says."""
    return {file.stem: file.read_text().splitlines()[0] for file in sorted(HERE.glob("*.patch"))}


def gated(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> what the gate says, as data; the base is the working tree."""
    found = {}
    for start in range(0, len(names), _ARMS_PER_SWEEP):
        some = names[start : start + _ARMS_PER_SWEEP]
        results = folder / f"results-{start}"
        arms = ["--arm", "base=."]
        for name in some:
            copy = folder / name
            copy.mkdir(parents=True)
            copy_of_core(copy, None if name == UNCHANGED else HERE / f"{name}.patch")
            arms += ["--arm", f"{name[:24]}=checkout:{copy}"]
        _command("run", *arms, results=results)
        for name in some:
            sides = ("--base", "base", "--head", name[:24])
            found[name] = json.loads(_command("gate", *arms, *sides, "--json", results=results))
    return found


def _command(verb: str, *arguments: str, results: Path) -> str:
    command = [sys.executable, "-m", "bench", verb, str(HERE / "cell.yaml"), *arguments]
    done = subprocess.run(
        [*command, "--results", str(results)], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(f"{verb}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def found_by(result: dict[str, Any]) -> dict[str, str]:
    """Exact metric -> reason, of those that regressed."""
    return {
        one["metric"]: one["reason"]
        for one in result["judgements"]
        if one["verdict"] == "regressed"
    }
