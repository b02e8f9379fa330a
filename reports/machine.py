"""What a record says about the machine and the code it was measured with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.record import RunRecord
from reports import quantity
from reports.printable import printable

UNKNOWN = "unknown"


def hardware_key(record: RunRecord) -> tuple[str, ...]:
    """What must agree before two times are compared: devices for a GPU run, else the processor.

    The host's name is not part of it: two equal machines are comparable.
    """
    environment = record.environment
    if record.resolved.launch.device == "cuda":
        names = _mapping(environment, "runtime").get("device_names")
        return ("cuda", *(sorted(map(str, names)) if isinstance(names, list) else [UNKNOWN]))
    count = environment.get("cpu_count", UNKNOWN)
    return ("cpu", str(environment.get("cpu_name") or UNKNOWN), str(count))


def describe_hardware(record: RunRecord) -> str:
    """The machine in words: `2 x NVIDIA H200`, or `AMD EPYC 9B14, 2 cores, 7.7 GiB (CPU)`."""
    kind, *rest = hardware_key(record)
    environment = record.environment
    if kind == "cuda":
        counts = {name: rest.count(name) for name in dict.fromkeys(rest)}
        return printable(" + ".join(f"{count} x {name}" for name, count in counts.items()))
    cores = rest[1]
    words = [rest[0], f"{cores} core{'' if cores == '1' else 's'}"]
    memory = environment.get("memory_bytes")
    if isinstance(memory, int | float):
        words.append(quantity.binary_bytes(memory))
    return printable(", ".join(words)) + " (CPU)"


def describe_code(record: RunRecord) -> str:
    """Commit, and whether files were changed on top of it: `1a2b3c4d5e6f (with local changes)`."""
    git = _mapping(record.environment, "git")
    commit = git.get("commit")
    if not commit:
        return UNKNOWN
    return printable(str(commit)[:12]) + (" (with local changes)" if git.get("dirty") else "")


def describe_software(record: RunRecord) -> str:
    """Python, torch and, on GPUs, CUDA and NCCL as the ranks had loaded them."""
    runtime = _mapping(record.environment, "runtime")
    names = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}
    parts = [f"{title} {runtime[key]}" for key, title in names.items() if runtime.get(key)]
    return printable(", ".join(parts)) or UNKNOWN


def describe_hosts(records: Iterable[RunRecord]) -> str:
    """Every host name, once."""
    return printable(distinct(str(r.environment.get("hostname") or UNKNOWN) for r in records))


def distinct(texts: Iterable[str]) -> str:
    """The different texts, in order, joined by semicolons."""
    return "; ".join(dict.fromkeys(texts)) or UNKNOWN


def _mapping(environment: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = environment.get(key)
    return value if isinstance(value, Mapping) else {}
