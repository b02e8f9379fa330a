"""What a part of the check leaves behind: a JSON record per part, also of one that died."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from bench.launch.environment import package_versions
from bench.launch.git import git_state
from bench.resolve.machine import Machine
from bench.store.atomic import write_json_atomically

ROOT: Final = Path(__file__).parents[2]
SCHEMA = 1

#: How two ranks came to share one device; empty or absent where they cannot.
SHARES_DEVICE = "MFSDP_GPU_CHECK_SHARES_DEVICE"

#: no_collective_ran: it holds, on one rank, which communicates with nobody.
State = Literal["passed", "no_collective_ran", "failed", "skipped", "crashed", "timed_out"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Check:
    """One statement that was tried. said: what was found, or why it was not tried."""

    name: str
    state: State
    said: str = ""


@dataclass
class PartFindings:
    """What a part has found so far. on_one_rank: what it tries communicates with nobody."""

    checks: list[Check] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)
    on_one_rank: bool = False

    def expect(self, name: str, holds: bool, said: str) -> None:
        """Note whether a statement holds."""
        held: State = "no_collective_ran" if self.on_one_rank else "passed"
        self.checks.append(Check(name, held if holds else "failed", said))

    def note(self, name: str, state: State, said: str) -> None:
        """Note a statement that was not tried, with the reason."""
        self.checks.append(Check(name, state, said))


def state_of(checks: Iterable[Check]) -> State:
    """A part failed if anything failed, and passed if anything passed; else why nothing ran."""
    states = {check.state for check in checks}
    for state in ("crashed", "timed_out", "failed", "passed", "no_collective_ran", "skipped"):
        if state in states:
            return state
    return "failed"


@dataclass(frozen=True)
class PartRecord:
    """The record of one part. seconds: it took. log: file of what it printed."""

    part: str
    device: Device
    state: State
    seconds: float
    limit_seconds: float
    started_utc: str
    checks: tuple[Check, ...]
    measurements: dict[str, Any]
    log: str

    def write(self, folder: Path) -> Path:
        """Write `PART.json`, with machine, versions, commit and command."""
        path = folder / f"{self.part}.json"
        write_json_atomically(path, {"schema": SCHEMA, **dataclasses.asdict(self), **origin()})
        return path


def origin() -> dict[str, Any]:
    """Where and from which code something is measured: machine, packages, commit, command."""
    machine = Machine.detect()
    return {
        "machine": {
            "hostname": machine.hostname,
            "cpu": f"{machine.cpu_name}, {machine.cpu_count} cores",
            "cuda_devices": list(machine.cuda_device_names),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "git": git_state(ROOT),
        "command": sys.argv,
    }
