"""The hardware behind a run as a key: what must agree before two times are compared.

Only what stays the same from day to day is part of it. Clock readings, temperatures, free memory
and host names are not: two equal machines are comparable, and one machine is comparable with itself
tomorrow.

Besides, the nodes that a run was made on, by the names that Slurm gives them, or a file of hosts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.record import RunRecord

UNKNOWN = "unknown"
STATED = "stated"
"""Kind of hardware that nobody measured: a log or a file says what it says of it."""

_DRIVER = re.compile(r"\b(\d{3,4})\.\d+")
_NOT_PLAIN = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class HardwareKey:
    """kind: cpu, cuda or `STATED`.

    device: name of the GPU or the processor, several names joined by " + ".
    count: GPUs of the run, or cores of the processor. interconnect: how the ranks reach each other
    ("host" within one machine of CPU ranks, "none" for one GPU). driver: major version, empty on
    CPU.
    """

    kind: str
    device: str
    count: int
    nodes: int = 1
    interconnect: str = UNKNOWN
    driver: str = ""

    @property
    def slug(self) -> str:
        """A file name: readable, and different for different keys."""
        words = _NOT_PLAIN.sub("-", self.device.lower()).strip("-")[:60]
        text = "|".join(str(value) for value in asdict(self).values())
        return f"{self.kind}-{words}-x{self.count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def describe(self) -> str:
        """In words, as `2 x NVIDIA H200, driver 550` or `AMD EPYC 9B14, 2 cores (CPU)`."""
        if self.kind == STATED:
            text = f"{self.device} (as stated)"
        elif self.kind == "cpu":
            text = f"{self.device}, {self.count} core{'' if self.count == 1 else 's'} (CPU)"
        else:
            text = f"{self.count} x {self.device}" + (
                f", driver {self.driver}" if self.driver else ""
            )
        return text if self.nodes == 1 else f"{text}, {self.nodes} nodes"


def hardware_key(record: RunRecord) -> HardwareKey:
    """The key of one run; what its environment does not say is unknown, or 1 for counts."""
    environment = record.environment
    nodes = record.resolved.launch.nodes
    interconnect = str(environment.get("interconnect") or UNKNOWN)
    if record.resolved.launch.device == "cpu":
        return HardwareKey(
            kind="cpu",
            device=str(environment.get("cpu_name") or UNKNOWN),
            count=_count(environment.get("cpu_count")),
            nodes=nodes,
            interconnect="host" if nodes == 1 else interconnect,
        )
    names = record.runtime.get("device_names")
    devices = [str(name) for name in names] if isinstance(names, list) else []
    count = len(devices) or record.resolved.launch.ranks
    driver = _DRIVER.search(str(environment.get("nvidia_driver")))
    return HardwareKey(
        kind="cuda",
        device=" + ".join(sorted(set(devices))) or UNKNOWN,
        count=count,
        nodes=nodes,
        interconnect="none" if count == 1 and nodes == 1 else interconnect,
        driver=driver[1] if driver else UNKNOWN,
    )


def _count(value: object) -> int:
    try:
        return max(1, int(str(value)))
    except ValueError:
        return 1


def _variables(record: RunRecord) -> Mapping[str, Any]:
    value = record.environment.get("variables")
    return value if isinstance(value, Mapping) else {}


def nodes_of(record: RunRecord) -> frozenset[str]:
    """As the ranks say; empty for a run on one machine that is no node of a cluster."""
    of_job = "SLURM_JOB_ID" in _variables(record)
    proofs = record.runtime.get("code_proof")
    if not isinstance(proofs, Mapping) or (not of_job and record.resolved.launch.nodes == 1):
        return frozenset()
    hosts = (proof.get("host") for proof in proofs.values() if isinstance(proof, Mapping))
    return frozenset(str(host) for host in hosts if host)
