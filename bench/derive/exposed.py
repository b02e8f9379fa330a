"""How much of the time of communication is exposed: nothing is computed meanwhile. No torch.

From a trace in Chrome's format, as torch's profiler writes it, of one rank:

    exposed(operation) = time of its intervals that no interval of computing covers, on its device

On a GPU communication is the kernels of NCCL, which also wait for other ranks, and as `copies` what
its copy engines do: copies between devices, or on a stream of NCCL's alone. Computing is the rest.
On a CPU computing is what torch's operations take on the thread that issues collectives, and
communication the intervals that gloo reports, or in which ranks of one host wait until they have
read each other's memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]

_NCCL = re.compile(r"nccl(?:Symk)?(?:Dev)?Kernel_?([A-Za-z]+)")
#: What gloo does; connections between ranks of one host have been until November 2026.
_GLOO = re.compile(r"(?:gloo|host_connections):(\w+)")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Exposure:
    """Of one operation, or of all: number of intervals, their time, and how much of it is exposed.

    Where intervals of an operation overlap, the time in which they do counts once.
    """

    count: int
    microseconds: float
    exposed_microseconds: float

    @property
    def fraction(self) -> float | None:
        """Exposed share of its time; None without any."""
        return self.exposed_microseconds / self.microseconds if self.microseconds else None


def exposed_communication(events: Iterable[Mapping[str, Any]]) -> dict[str, Exposure]:
    """By operation as the library calls it (`AllGather`, `all_reduce`), and of `all` together.

    events: `traceEvents` of a trace. Empty where nothing was communicated.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    communicating: dict[str, dict[object, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    computing: dict[object, list[Interval]] = defaultdict(list)
    threads = _issuing_threads(complete)
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    streams = {_stream(kernel) for kernel in kernels if _operation(kernel, ())}
    streams -= {_stream(kernel) for kernel in kernels if not _operation(kernel, ())}
    for event in complete:
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        name, category = str(event.get("name", "")), event.get("cat")
        where: object = "host"
        if category in _ON_DEVICE:
            where = ("device", event.get("pid"))
        operation = _operation(event, streams)
        if operation:
            communicating[operation][where].append(interval)
        elif category in _ON_DEVICE or (
            category == "cpu_op" and name.startswith("aten::") and event.get("tid") in threads
        ):
            computing[where].append(interval)
    busy = {where: merged(intervals) for where, intervals in computing.items()}
    exposures = {name: _exposure(places, busy) for name, places in sorted(communicating.items())}
    if exposures:
        together: dict[object, list[Interval]] = defaultdict(list)
        for by_place in communicating.values():
            for where, intervals in by_place.items():
                together[where] += intervals
        exposures["all"] = _exposure(together, busy)
    return exposures


def _operation(event: Mapping[str, Any], streams: Container[object]) -> str:
    """What an interval communicates; "" if it does not. streams: those of NCCL."""
    name, category = str(event.get("name", "")), event.get("cat")
    match = (_NCCL.search if category in _ON_DEVICE else _GLOO.match)(name)
    if match is not None:
        return match[1]
    is_copy = category == "gpu_memcpy" and ("PtoP" in name or _stream(event) in streams)
    return "copies" if is_copy else ""


def _stream(event: Mapping[str, Any]) -> object:
    return event.get("pid"), event.get("tid")


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def uncovered(intervals: Sequence[Interval], cover: Sequence[Interval]) -> float:
    """Time in `intervals` and outside of `cover`; both as `merged` gives them."""
    left, index = 0.0, 0
    for start, end in intervals:
        while index < len(cover) and cover[index][1] <= start:
            index += 1
        left += end - start
        at = index
        while at < len(cover) and cover[at][0] < end:
            left -= min(end, cover[at][1]) - max(start, cover[at][0])
            at += 1
    return left


def _exposure(
    by_place: Mapping[object, Sequence[Interval]], busy: Mapping[object, Sequence[Interval]]
) -> Exposure:
    count, total, exposed = 0, 0.0, 0.0
    for where, intervals in by_place.items():
        once = merged(intervals)
        count += len(intervals)
        total += sum(end - start for start, end in once)
        exposed += uncovered(once, busy.get(where, ()))
    return Exposure(count, total, exposed)


def _issuing_threads(events: Iterable[Mapping[str, Any]]) -> set[object]:
    """Threads that issue collectives; work that gloo does on threads of its own is none."""
    return {
        event.get("tid")
        for event in events
        if event.get("cat") == "cpu_op" and str(event.get("name", "")).startswith("c10d::")
    }
