"""Where and from which code something is measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from bench.launch.environment import package_versions
from bench.launch.git import git_state
from bench.resolve.machine import Machine

ROOT: Final = Path(__file__).parents[1]


def origin() -> dict[str, Any]:
    """Machine, packages, commit, command. Loads no torch."""
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
