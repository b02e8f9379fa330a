"""How often the kernel has ended processes for lack of memory: a count before and after a run."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def out_of_memory_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Kills so far by the counters that can be read (0 if none can).

    The largest is taken: a container's own count and the machine's include the same kills.
    """
    return max((_count(path) for path in counters), default=0)


def _count(path: Path) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0
