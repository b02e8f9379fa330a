"""What each rank of `doctor --cluster` does: it shows itself, and measures the way to its peers.

`python -m bench.doctor.cluster_rank RUN_DIR`, started by a launcher. Rank 0 leaves `cluster.json`:
facts of every rank, offsets of the clocks of nodes, bandwidths of pairs of ranks.

[Note: pairs in rounds] In a round every rank is in one pair at most, so that n ranks take n - 1
rounds (the circle method of tournaments). First all ranks of a node, all nodes at a time; then the
first ranks of all nodes. Pairs of a round share switches, as they do in training.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.launch.environment import cpu_governors, nvidia_driver, package_versions
from bench.launch.rank_code import own_code
from bench.launch.rank_entry.mfsdp_bench_rank import placement
from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.resolve import Machine
from bench.store.atomic import write_json_atomically
from bench.store.reading import read_spec
from bench.store.samples import node_file
from bench.worker.place import Place, process_group
from bench.worker.runtime_report import nccl_version

REPORT = "cluster.json"
_MESSAGE_BYTES = 8 * 2**20
_REPEATS = 3
_CLOCK_ROUNDS = 20
_VARIABLES = ("NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_PRELOAD")

Pair = tuple[int, int]


def main(run_dir: Path) -> None:
    """Take part, and count as one step that is done."""
    resolved = read_spec(run_dir)
    place = Place.from_environment(resolved)
    begun = time.monotonic()
    with process_group(place, resolved):
        met_seconds = time.monotonic() - begun
        facts = _gathered({"rank": place.rank, "node": place.node, **own_facts(met_seconds)})
        by_node = ranks_by_node(facts)
        clocks = _clock_offsets(place, [ranks[0] for ranks in by_node.values()])
        rounds = [*_at_once(by_node.values()), *rounds_of([r[0] for r in by_node.values()])]
        pairs = [pair for found in _gathered(_bandwidths(place, rounds)) for pair in found]
        if place.rank == 0:
            report = {"ranks": facts, "clocks": clocks, "pairs": pairs, "bytes": _MESSAGE_BYTES}
            write_json_atomically(run_dir / REPORT, report)
    with SampleSink(run_dir / node_file(place.node), place.rank) as sink:
        sink.append(StepSample(1, met_seconds * 1e3, 0.0, None, 0.0, 0, None, 0))


def own_facts(met_seconds: float) -> dict[str, Any]:
    """Where this rank is, and everything that should be the same on all nodes."""
    machine, code = Machine.detect(), own_code()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl_version("runtime") if torch.cuda.is_available() else None,
        "driver": nvidia_driver(),
        "kernel": platform.release(),
        "processor": machine.cpu_name,
        "devices": list(machine.cuda_device_names),
        "governors": cpu_governors(),
        "checkout": str(code.root),
        **{f"package {name}": version for name, version in package_versions().items()},
        **{k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
    }
    return {**placement(), "met_seconds": met_seconds, "same": found}


def ranks_by_node(facts: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Node number -> its ranks, in order."""
    nodes: dict[int, list[int]] = {}
    for one in sorted(facts, key=lambda fact: (fact["node"], fact["rank"])):
        nodes.setdefault(one["node"], []).append(one["rank"])
    return nodes


def rounds_of(players: Sequence[int]) -> list[list[Pair]]:
    """Every pair once, in rounds of disjoint pairs ([Note: pairs in rounds])."""
    seats: list[int | None] = [*players, *([None] * (len(players) % 2))]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        sides = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _at_once(groups: Any) -> list[list[Pair]]:
    """The rounds of all nodes side by side."""
    each = [rounds_of(ranks) for ranks in groups]
    most = max((len(rounds) for rounds in each), default=0)
    return [
        [p for rounds in each for p in (rounds[i] if i < len(rounds) else [])] for i in range(most)
    ]


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _bandwidths(place: Place, rounds: Sequence[Sequence[Pair]]) -> list[dict[str, Any]]:
    """Of the pairs of which this rank is the first."""
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=place.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=place.device)
    found = []
    for pairs in rounds:
        for first, second in pairs:
            if place.rank == first:
                there = _seconds_to(second, message, answer)
                _answer_to(second, message, answer)
                back = _received(second, place)
                found.append(
                    {"ranks": [first, second], "there_seconds": there, "back_seconds": back}
                )
            elif place.rank == second:
                _answer_to(first, message, answer)
                back = _seconds_to(first, message, answer)
                _send(first, torch.tensor([back], dtype=torch.float64, device=place.device))
    return found


def _seconds_to(peer: int, message: Tensor, answer: Tensor) -> float:
    """The shortest of some round trips of a long message and a short answer, after a first one."""
    taken = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter()
        _send(peer, message)
        _receive(peer, answer)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def _answer_to(peer: int, message: Tensor, answer: Tensor) -> None:
    for _ in range(_REPEATS + 1):
        _receive(peer, message)
        _send(peer, answer)


def _received(peer: int, place: Place) -> float:
    buffer = torch.zeros(1, dtype=torch.float64, device=place.device)
    _receive(peer, buffer)
    return float(buffer)


def _clock_offsets(place: Place, firsts: Sequence[int]) -> list[dict[str, float]]:
    """Offset of the clock of each node's first rank from rank 0's, and how sure that is."""
    found = []
    for peer in firsts:
        if peer == 0:
            continue
        if place.rank == 0:
            found.append({"rank": peer, **_offset_of(peer, place)})
        elif place.rank == peer:
            for _ in range(_CLOCK_ROUNDS):
                _received(0, place)
                _send(0, torch.tensor([time.time()], dtype=torch.float64, device=place.device))
    return found


def _offset_of(peer: int, place: Place) -> dict[str, float]:
    """By the round trip that was fastest: its middle is when the peer looked at its clock."""
    trips = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        _send(peer, torch.tensor([sent], dtype=torch.float64, device=place.device))
        there = _received(peer, place)
        back = time.time()
        trips.append((back - sent, there - statistics.fmean((sent, back))))
    took, offset = min(trips)
    return {"offset_seconds": offset, "uncertainty_seconds": took / 2}


def _send(peer: int, tensor: Tensor) -> None:
    _exchange(dist.P2POp(dist.isend, tensor, peer))


def _receive(peer: int, tensor: Tensor) -> None:
    _exchange(dist.P2POp(dist.irecv, tensor, peer))


def _exchange(operation: dist.P2POp) -> None:
    """As a batch of one, since NCCL makes a communicator for every pair otherwise."""
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    if operation.tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
