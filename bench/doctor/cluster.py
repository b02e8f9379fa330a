"""`doctor --cluster`: a short job over all nodes, and what its report says about them."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.doctor.finding import Finding
from bench.launch.code_proof import read_proofs
from bench.launch.protocol import Launcher
from bench.launch.run import launch
from bench.record import RunStatus, shortened
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DeviceType, EngineSpec, LaunchSpec, ResolvedRun, RunSpec, TrainSpec
from bench.store import RunFolder
from bench.store.file_system import nearest_folder
from bench.store.run_folder import utc_now

REPORT = "cluster.json"  # as `cluster_rank`, which loads torch, names it
_RANK_MODULE = "bench.doctor.cluster_rank"
_JOB_SECONDS = 60.0
_START_SECONDS = 120.0
_FEW_SECONDS = 1e-3
_SLOW_SHARE = 0.5
_SHOWN = 6


@dataclass(frozen=True)
class Asked:
    """ranks: of the whole job, the same number on each of `nodes`."""

    ranks: int
    device: DeviceType
    nodes: int = 1


@dataclass(frozen=True)
class Probe:
    """finished: every rank took part to the end; else the findings say which did not."""

    findings: list[Finding]
    finished: bool


def probe_cluster(asked: Asked, launcher: Launcher, results: Path, stop: threading.Event) -> Probe:
    """Run the job and judge its report; nothing is left in the results folder.

    Args:
        asked: how many ranks, where.
        launcher: what starts them.
        results: a folder that all nodes see.
        stop: set it to end the job.

    Raises:
        UsageError: the folder may not be written.
    """
    resolved = _job(asked)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=nearest_folder(results)) as scratch:
        started = RunStatus(state="running", started_utc=utc_now(), comparable_in_time=False)
        folder = RunFolder.create(Path(scratch), resolved, started)
        status = launch(resolved, folder, stop=stop, worker_module=_RANK_MODULE, launcher=launcher)
        if status.state not in {"ok", "unstable"}:
            return Probe(failure(status, read_proofs(folder, asked.ranks), asked), finished=False)
        report: dict[str, Any] = json.loads((folder.path / REPORT).read_text())
    return Probe(judged(report), finished=True)


def _job(asked: Asked) -> ResolvedRun:
    """A run of one step: the launcher takes it for any other."""
    return resolve_anywhere(
        RunSpec(
            engine=EngineSpec(name="ddp"),
            train=TrainSpec(steps=1, global_batch=asked.ranks, micro_batch=1),
            launch=LaunchSpec(
                ranks=asked.ranks,
                nodes=asked.nodes,
                device=asked.device,
                timeout_seconds=_JOB_SECONDS + _START_SECONDS,
                hang_seconds=_JOB_SECONDS,
            ),
        )
    )


def failure(
    status: RunStatus, proofs: Mapping[int, Mapping[str, Any]], asked: Asked
) -> list[Finding]:
    """Which ranks started, where, and what ended the job."""
    hosts = Counter(str(proof.get("host")) for proof in proofs.values())
    started = ", ".join(f"{count} on {host}" for host, count in hosts.items()) or "none"
    found = [Finding("ok" if len(proofs) == asked.ranks else "problem", "ranks started", started)]
    absent = [rank for rank in range(asked.ranks) if rank not in proofs]
    if absent:
        found.append(
            Finding(
                "problem",
                "ranks without a sign of life",
                shortened(absent),
                "runs on all nodes",
                "the node must see this checkout, its environment and the results folder",
            )
        )
    named = proofs.get(status.failed_rank if status.failed_rank is not None else -1, {})
    host = f" (on {named['host']})" if "host" in named else ""
    remedy = "the network between nodes: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewalls"
    reason = f"{status.state}: {status.reason}{host}"
    return [*found, Finding("problem", "job over all nodes", reason, "runs on all nodes", remedy)]


def judged(report: Mapping[str, Any]) -> list[Finding]:
    """Findings from `cluster.json`; a problem where nodes differ in what they run."""
    facts: list[dict[str, Any]] = report["ranks"]
    return [
        _rendezvous(facts),
        *_differences(facts),
        *_clocks(report["clocks"], facts),
        *_bandwidths(report, facts),
    ]


def _rendezvous(facts: Sequence[dict[str, Any]]) -> Finding:
    hosts = Counter(fact["host"] for fact in facts)
    shown = [f"{count} on {host}" for host, count in list(hosts.items())[:_SHOWN]]
    more = f", {len(hosts) - _SHOWN} more nodes" if len(hosts) > _SHOWN else ""
    slowest = max(facts, key=lambda fact: float(fact["met_seconds"]))
    return Finding(
        "ok",
        "rendezvous",
        f"{len(facts)} ranks met: {', '.join(shown)}{more}; the slowest took"
        f" {slowest['met_seconds']:.1f} s (rank {slowest['rank']} on {slowest['host']})",
    )


def _differences(facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """What is not the same everywhere: the value of most, and who has another."""
    names = sorted({name for fact in facts for name in fact["same"]})
    found = []
    for name in names:
        values = {fact["rank"]: json.dumps(fact["same"].get(name)) for fact in facts}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        others: dict[str, list[str]] = {}
        for fact in facts:
            if values[fact["rank"]] != usual:
                others.setdefault(values[fact["rank"]], []).append(fact["host"])
        text = "; ".join(
            f"{value} on {', '.join(list(dict.fromkeys(hosts))[:_SHOWN])}"
            for value, hosts in others.items()
        )
        found.append(
            Finding(
                "problem",
                f"{name} differs",
                f"{usual} on most, {text}",
                "runs whose ranks all do the same",
                "install the same on all nodes, or leave those out",
            )
        )
    return found or [Finding("ok", "versions and settings", "the same on all ranks")]


def _clocks(clocks: Sequence[dict[str, float]], facts: Sequence[dict[str, Any]]) -> list[Finding]:
    hosts = {fact["rank"]: fact["host"] for fact in facts}
    if not clocks:
        return [Finding("ok", "clock skew", "one node: one clock")]
    worst = max(clocks, key=lambda one: abs(one["offset_seconds"]))
    offset, unsure = worst["offset_seconds"], worst["uncertainty_seconds"]
    found = (
        f"at most {abs(offset) * 1e3:.3f} ms ({hosts[int(worst['rank'])]} against {hosts[0]},"
        f" known to {unsure * 1e3:.3f} ms)"
    )
    if abs(offset) - unsure <= _FEW_SECONDS:
        return [Finding("ok", "clock skew", found)]
    remedy = "run chrony on all nodes, against the same source"
    return [Finding("note", "clock skew", found, "times of events that can be compared", remedy)]


def _bandwidths(report: Mapping[str, Any], facts: Sequence[dict[str, Any]]) -> list[Finding]:
    places = {fact["rank"]: fact for fact in facts}
    kinds: dict[str, list[tuple[float, str]]] = {"within nodes": [], "between nodes": []}
    for pair in report["pairs"]:
        first, second = (places[rank] for rank in pair["ranks"])
        within = first["node"] == second["node"]
        slower = max(pair["there_seconds"], pair["back_seconds"])
        name = f"ranks {first['rank']} and {second['rank']}, {first['host']}"
        name += "" if within else f" and {second['host']}"
        rate = report["bytes"] / slower / 1e9
        kinds["within nodes" if within else "between nodes"].append((rate, name))
    return [finding for kind, rates in kinds.items() if rates for finding in _rates(kind, rates)]


def _rates(kind: str, rates: Sequence[tuple[float, str]]) -> list[Finding]:
    """The spread over pairs, and the pairs that are far below their median."""
    usual = statistics.median(rate for rate, _ in rates)
    slowest, fastest = min(rates), max(rates)
    found = f"{usual:.2f} GB/s, the median of {len(rates)} pairs"
    if len(rates) > 1:
        found += f"; {slowest[0]:.2f} ({slowest[1]}) to {fastest[0]:.2f}"
    slow = sorted(one for one in rates if one[0] < _SLOW_SHARE * usual)
    shown = [Finding("ok", f"bandwidth {kind}", found)]
    if slow:
        named = "; ".join(f"{rate:.2f} GB/s ({name})" for rate, name in slow[:_SHOWN])
        more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        gives = "runs as fast as the other pairs allow"
        remedy = "cables, switches, NCCL_IB_HCA; leave the node out: sbatch --exclude"
        shown.append(Finding("note", f"slow pairs {kind}", named + more, gives, remedy))
    return shown
