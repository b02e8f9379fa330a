"""Whether two ranks can share the one device of this machine: tried in a process of its own.

NCCL can since 2.30, where it is asked to (`bench.launch.command.SHARED_DEVICE`); its documentation
calls that experimental, and too few channels make it hang. So the trial has a time limit. A newer
library than torch's is loaded before it: `NCCL_LIB`, else what `make gpu-wheels NCCL=13` brought.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.launch.command import SHARED_DEVICE, nccl_library
from tools.gpu_check.record import ROOT, SHARES_DEVICE
from tools.gpu_wheels import NCCL_LIBRARY, PACKAGES

#: The first NCCL that lets several ranks share a device.
SHARING_NCCL = (2, 30, 0)
SECONDS = 90.0
_CHILD = (sys.executable, "-m", "tools.gpu_check.sharing")
_RANKS = 2
#: Of ranks 0 and 1, which give 1 and 2.
_SUM = 3.0


@dataclass(frozen=True)
class Sharing:
    """works: two ranks have added up on one device. said: how that was found. library: of NCCL."""

    works: bool
    said: str
    library: str | None = None

    def variables(self) -> dict[str, str]:
        """What parts of the check are started with."""
        added = {SHARES_DEVICE: self.said if self.works else ""}
        if not self.works:
            return added
        return added | SHARED_DEVICE | ({"NCCL_LIB": self.library} if self.library else {})


def find(
    devices: int,
    variables: Mapping[str, str],
    packages: Path = ROOT / PACKAGES,
    command: Sequence[str] = _CHILD,
    seconds: float = SECONDS,
) -> Sharing:
    """The newer library first, then torch's own; why not, in words, where neither can."""
    if devices > 1:
        return Sharing(False, f"{devices} devices: a rank on each")
    brought = packages / NCCL_LIBRARY
    named = variables.get("NCCL_LIB") or (str(brought) if brought.exists() else None)
    said = []
    for library in dict.fromkeys((named, None)):
        works, found = _tried(library, variables, command, seconds)
        said.append(f"{library or 'the NCCL of torch'}: {found}")
        if works:
            return Sharing(True, said[-1], library)
    if named is None:
        said.append("make gpu-wheels NCCL=13 fetches a newer one")
    return Sharing(False, "; ".join(said))


def _tried(
    library: str | None, variables: Mapping[str, str], command: Sequence[str], seconds: float
) -> tuple[bool, str]:
    inherited = {name: value for name, value in variables.items() if name != "NCCL_LIB"}
    environment = inherited | SHARED_DEVICE | nccl_library({**inherited, "NCCL_LIB": library or ""})
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False, f"the trial was ended after {seconds:g} s"
    if process.returncode:
        last = [line for line in errors.splitlines() if line.strip()][-1:]
        return False, f"the trial ended with {process.returncode}: {''.join(last)[:300]}"
    found = json.loads(out.splitlines()[-1])
    if "sums" not in found:
        return False, f"NCCL {found['nccl']} puts one rank on a device, 2.30 and later more"
    if found["sums"] != [_SUM] * _RANKS:
        return False, f"NCCL {found['nccl']} added 1 and 2 up to {found['sums']}"
    return True, f"NCCL {found['nccl']}: {_RANKS} ranks on one device have added up"


def main() -> int:
    """The trial: a line of JSON."""
    from bench.worker.runtime_report import nccl_version
    from tools.gpu_check.timed import summed
    from tools.gpu_check.training import ranks

    found: dict[str, object] = {"nccl": nccl_version("runtime") or "0"}
    if tuple(map(int, str(found["nccl"]).split("."))) >= SHARING_NCCL:
        with ranks("cuda", _RANKS) as workers:
            found["sums"] = workers.run(summed, "cuda", seconds=SECONDS / 2)
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
