"""What a record says about the machine and the code it was measured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from bench.derive.hardware import UNKNOWN, hardware_key
from bench.record import RunRecord
from reports.renderers import quantity
from reports.renderers.printable import printable

#: Load above so many times what the benchmark itself causes is called busy.
_BUSY_FACTOR = 1.5


def describe_hardware(record: RunRecord) -> str:
    """The machine in words: `2 x NVIDIA H200`, or `AMD EPYC 9B14, 2 cores, 7.7 GiB (CPU)`."""
    words = hardware_key(record).describe()
    memory = record.environment.get("memory_bytes")
    if record.resolved.launch.device == "cpu" and isinstance(memory, int | float):
        words = f"{words.removesuffix(' (CPU)')}, {quantity.binary_bytes(memory)} (CPU)"
    return printable(words)


def describe_code(record: RunRecord) -> str:
    """Commit, and whether files were changed on top of it: `1a2b3c4d5e6f (with local changes)`."""
    git = entries(record.environment, "git")
    commit = git.get("commit")
    if not commit:
        return UNKNOWN
    return printable(str(commit)[:12]) + (" (with local changes)" if git.get("dirty") else "")


def describe_software(record: RunRecord) -> str:
    """Python, torch and, on GPUs, CUDA and NCCL as the ranks had loaded them."""
    runtime = record.runtime
    names = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}
    parts = [f"{title} {runtime[key]}" for key, title in names.items() if runtime.get(key)]
    return printable(", ".join(parts)) or UNKNOWN


def busiest_start(records: Iterable[RunRecord]) -> str:
    """A warning where other work kept the machine busy before a run, else an empty text.

    A run of this project before it leaves a load of its own in the last minute's average: up to one
    per rank and core. More than that is somebody else's.
    """
    worst: tuple[float, float] | None = None
    for record in records:
        load, cores = (record.environment.get(k) for k in ("load_average_before", "cpu_count"))
        if isinstance(load, int | float) and isinstance(cores, int) and cores > 0:
            own = max(cores, record.resolved.launch.ranks)
            if load > _BUSY_FACTOR * own and (worst is None or load / own > worst[0] / worst[1]):
                worst = float(load), float(own)
    if worst is None:
        return ""
    return (
        f"The machine was busy with other work: before one run its load average was {worst[0]:.1f},"
        f" where {worst[1]:.0f} would be this benchmark's own. Times and throughput mean little."
    )


def distinct(texts: Iterable[str]) -> str:
    """The different texts, in order, joined by semicolons."""
    return "; ".join(dict.fromkeys(texts)) or UNKNOWN


def entries(environment: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under `key`; empty where it is missing or no mapping."""
    value = environment.get(key)
    return value if isinstance(value, Mapping) else {}


_SMALL = 1024


def _outside(sizes: Mapping[str, Any]) -> str:
    """How many collectives of each operation, without those of a few flags and maxima."""
    large = [name for name, size in sizes.items() if isinstance(size, int) and size >= _SMALL]
    counts = Counter(str(name).partition(" of ")[0] for name in large)
    return ", ".join(f"{count} {operation}" for operation, count in sorted(counts.items()))


def registration_shortfalls(records: Iterable[RunRecord]) -> list[str]:
    """A warning per way in which buffers were not registered with NCCL as a run had requested."""
    warnings: Counter[str] = Counter()
    for record in records:
        registration = entries(record.runtime, "buffer_registration")
        wanted = registration.get("wanted")
        for name, group in sorted(entries(registration, "groups").items()):
            if isinstance(group, dict) and group.get("got") != wanted:
                text = f"group {name} got {group.get('got')} instead: {group.get('reason')}"
                warnings[f"Buffers were to be registered with NCCL as {wanted}; {text}."] += 1
        if registration.get("grown"):
            warnings[
                "Memory was allocated for collectives after the registration, which lacks it."
            ] += 1
        if outside := _outside(entries(registration, "outside")):
            warnings[f"Collectives had memory that is not registered: {outside}."] += 1
    return [printable(f"{text} ({count} runs)") for text, count in warnings.items()]
