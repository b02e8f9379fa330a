"""The work of one rank of a run that times a collective, from `spec.json` to its last sample.

A step is a barrier, some operations one after the other, and one operation on values whose result
is known, outside of the clock. Where the host does the work, it waits for each operation, and their
mean is the time of the step. On a device they are timed twice: enqueued one behind the other on the
stream of their group, between two events, which is the time of the step, with one wait between
streams before all of them and one behind; and each waited for by the host, which is its latency.

The barrier lets no rank begin while another one checks. Ranks leave it a little apart; that is a
part of the slowest rank's time, divided by the number of operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch.distributed as dist

from bench.engines.protocol import TimedCollective
from bench.engines.registry import build_collective
from bench.meters.cost import MeterCost
from bench.meters.cpu_time import CpuMeter, spent
from bench.meters.device_state import DeviceState
from bench.meters.memory import MemoryMeter
from bench.meters.phases import PhaseMeter
from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.spec import CollectiveSettings, ResolvedRun
from bench.store.atomic import write_json_atomically
from bench.store.layout import MEMORY, RUNTIME
from bench.store.samples import node_file
from bench.worker.counting import gathered
from bench.worker.memory_report import memory_report
from bench.worker.nccl_evidence import NcclEvidence
from bench.worker.rank_process import RankProcess
from bench.worker.runtime_report import runtime_report

_WARM_UP: Final = 5


@dataclass(frozen=True)
class OperationTimes:
    """Of one operation; host_milliseconds: until the host had enqueued it, None on a CPU."""

    milliseconds: float
    latency_milliseconds: float
    host_milliseconds: float | None = None


class OperationClock:
    """Times operations of one rank."""

    def __init__(self, collective: TimedCollective, operations: int, process: RankProcess) -> None:
        self._collective = collective
        self._operations = operations
        self._phases = PhaseMeter.of(process.device)
        self._is_device = process.device.type == "cuda"

    def step(self) -> OperationTimes:
        """All ranks at once. Collective."""
        dist.barrier()
        waited = [self._waited() for _ in range(self._operations)]
        if not self._is_device:
            return OperationTimes(sum(waited) / len(waited), median(waited))
        dist.barrier()
        self._phases.begin()
        self._phases.mark("operations")
        self._collective.enqueue(self._operations)
        self._phases.end()
        self._collective.synchronize()
        taken = self._phases.milliseconds()["operations"] / self._operations
        host = (self._phases.host_milliseconds or 0.0) / self._operations
        return OperationTimes(taken, median(waited), host)

    def _waited(self) -> float:
        start = perf_counter()
        self._collective.start().wait()
        self._collective.synchronize()
        return (perf_counter() - start) * 1e3


def measure_collective(
    resolved: ResolvedRun, settings: CollectiveSettings, process: RankProcess, run_dir: Path
) -> None:
    """Leaves what a run that trains leaves, without losses.

    Raises:
        WrongValuesError: a result is not what it should be (`bench.engines.collective`).
    """
    collective = build_collective(resolved, process.device)
    if process.rank == 0:
        write_json_atomically(run_dir / RUNTIME, runtime_report(collective, resolved, process))
    evidence = NcclEvidence.of(resolved, run_dir, process.rank)
    clock = OperationClock(collective, settings.operations, process)
    state = DeviceState.of(process.device)
    memory, cpu, cost = MemoryMeter(process.device), CpuMeter(), MeterCost()
    collective.check()
    for _ in range(_WARM_UP):
        collective.start().wait()
    with SampleSink(run_dir / node_file(process.node), process.rank) as sink:
        for step in range(1, resolved.train.steps + 1):
            before = cpu.read()
            times = clock.step()
            used = spent(before, cpu.read())
            cost.add_step(times.milliseconds * settings.operations / 1e3)
            with cost.timed("check"):
                collective.check()
            device = memory.device_allocator()
            if device is not None and state is not None:
                device |= state.after_step() or {}
            sink.append(
                StepSample(
                    step=step,
                    milliseconds=times.milliseconds,
                    loss=None,
                    grad_norm=None,
                    learning_rate=0.0,
                    tokens=0,
                    wire_bytes=None,
                    rss_bytes=memory.rss_bytes(),
                    device_peak_bytes=memory.device_peak_bytes(),
                    cpu_milliseconds=_each(used, settings.operations),
                    host_milliseconds=times.host_milliseconds,
                    device=device,
                    latency_milliseconds=times.latency_milliseconds,
                )
            )
            if evidence is not None:
                evidence.after_step(step)
    if evidence is not None:
        evidence.record_groups(resolved)
    devices = [] if state is None else gathered(state.report(), process)
    if process.rank == 0:
        report = runtime_report(collective, resolved, process, cost) | {"devices": devices}
        write_json_atomically(run_dir / RUNTIME, report)
        write_json_atomically(run_dir / MEMORY, memory_report(collective, process, None))
    collective.close()


def _each(milliseconds: dict[str, float] | None, operations: int) -> dict[str, float] | None:
    """Of one operation, as the time of the step is."""
    if milliseconds is None:
        return None
    return {role: round(time / operations, 4) for role, time in milliseconds.items()}
