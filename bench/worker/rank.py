"""The work of one rank, from `spec.json` to its last sample."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bench.data.batches import build_batches
from bench.derive.live_storage import over_ranks
from bench.engines.registry import build_engine
from bench.loop import TrainingLoop
from bench.meters.call_sites import CallSites
from bench.meters.live_storage import LiveStorageMeter
from bench.meters.memory_profile import MemoryProfile
from bench.meters.memory_timeline import TimelineMeter
from bench.meters.sample_sink import SampleSink, SetupBeat
from bench.meters.torch_trace import TorchTrace
from bench.models.build import run_model
from bench.spec import ResolvedRun, known_engine
from bench.store.atomic import write_json_atomically
from bench.store.layout import (
    COUNTS,
    ISSUED,
    LOGS,
    MEMORY,
    RUNTIME,
    TRACE,
    rank_file,
)
from bench.store.reading import read_spec
from bench.store.samples import node_file
from bench.worker.collective_log import CollectiveLog
from bench.worker.counting import count_steps, gathered, is_compiled
from bench.worker.fingerprints import fingerprints
from bench.worker.nccl_evidence import NcclEvidence
from bench.worker.numa import bind_to_node
from bench.worker.rank_process import RankProcess, process_group
from bench.worker.reports import memory_report, runtime_report


def run_rank(run_dir: Path) -> None:
    """Train as `run_dir/spec.json` says, as the rank that the environment makes of this process."""
    resolved = read_spec(run_dir)
    torch.set_num_threads(resolved.launch.threads_per_rank)
    process = RankProcess.from_environment(resolved)
    numa_node = bind_to_node(
        process.device, process.local_rank, process.local_ranks, resolved.launch.threads_per_rank
    )
    with process_group(process, resolved):
        _train(resolved, process, run_dir, numa_node)


def _train(
    resolved: ResolvedRun, process: RankProcess, run_dir: Path, numa_node: int | None
) -> None:
    profile = MemoryProfile.of(resolved, process.device)
    own_file = partial(rank_file, rank=process.rank)
    sites = CallSites(known_engine(resolved.engine.name).torch_code)
    live = LiveStorageMeter(sites, process.device, resolved.train.steps)
    live.start()
    model, make_batch = run_model(resolved, process.device)
    values = getattr(model, "initial_values", None)
    if values is not None:
        values.on_chunk = SetupBeat(run_dir / node_file(process.node))
    batches = build_batches(resolved, process.rank, process.device, make_batch)
    engine = build_engine(model, resolved, process.device)
    live.built(compiled=is_compiled(model))
    first_rows = {} if values is None else values.first_rows
    start = {
        "start": fingerprints(engine, first_rows, process),
        "numa_nodes": gathered(numa_node, process),
    }
    if process.rank == 0:
        write_json_atomically(run_dir / RUNTIME, runtime_report(engine, resolved, process) | start)
    if profile is not None:
        profile.watch(model)
    recorder = None
    if process.rank == 0:
        recorder = TimelineMeter.of(engine, profile.activations if profile is not None else None)
    trace = TorchTrace.of(resolved, run_dir / own_file(TRACE), process.device, engine)
    evidence = NcclEvidence.of(resolved, run_dir, process.rank)
    collectives = CollectiveLog(engine, run_dir / LOGS / own_file(ISSUED))
    with collectives, SampleSink(run_dir / node_file(process.node), process.rank) as sink:
        loop = TrainingLoop(
            engine,
            batches,
            resolved,
            device=process.device,
            sink=sink,
            listeners=tuple(filter(None, (recorder, trace))),
        )
        if not is_compiled(model):  # its hooks would be traced
            loop.phases.watch(model)
        cost = loop.run(filter(None, (recorder, live, profile, evidence, trace)))
    if evidence is not None:
        evidence.record_groups(resolved)
    held = None if live.found is None else over_ranks(gathered(live.found, process))
    devices = [] if loop.device_state is None else gathered(loop.device_state.report(), process)
    if process.rank == 0:
        timeline = None if recorder is None else recorder.timeline
        report = runtime_report(engine, resolved, process, cost) | {"devices": devices} | start
        exposed = {"communication": trace.exposed} if trace else {}
        write_json_atomically(run_dir / RUNTIME, report | exposed)
        memory = memory_report(engine, process, profile, timeline) | (loop.setup_peaks or {})
        live_rows = held and held.model_dump(mode="json")
        write_json_atomically(run_dir / MEMORY, memory | {"live": live_rows})
    if resolved.measure.counts:  # last, so that no time and no memory is its own
        counts = count_steps(loop, model, resolved, process)
        if process.rank == 0:
            write_json_atomically(run_dir / COUNTS, counts.model_dump(mode="json"))
    getattr(engine, "close", lambda: None)()
