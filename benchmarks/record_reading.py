"""How long large results take to read: one record of many ranks, and `status` of many runs.

    python -m benchmarks.record_reading [--ranks 4096] [--steps 50] [--runs 500] [--per-rank]

Both are generated in a temporary folder. `--per-rank` writes samples as older versions did, a file
per rank. Targets: 4,096 ranks x 50 steps in under 5 s, 500 runs in under 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.cli.statuses import show_status
from bench.launch import code_identity
from bench.resolve import Machine
from bench.spec import ResolvedRun
from bench.store import ResultsStore
from sweeps.definition import parse_sweep
from sweeps.plan import make_plan

_RANKS_PER_NODE: Final = 8
_MACHINE: Final = Machine(cpu_count=2, memory_bytes=2**36)
_SWEEP: Final = """\
name: many
base: {train: {steps: 20, global_batch: 4, micro_batch: 2}}
matrix:
  product: {engine.name: [mfsdp, fsdp2, ddp, single], dtypes.compute: [fp32, bf16]}
"""


@dataclass(frozen=True)
class Size:
    """Of what is generated."""

    ranks: int
    steps: int
    runs: int
    per_rank: bool


def main() -> None:
    """Generate, read, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--per-rank", action="store_true")
    size = Size(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as scratch:
        measure_record(Path(scratch) / "one", size)
        measure_status(Path(scratch) / "many", size)


def measure_record(root: Path, size: Size) -> None:
    """One record of `size.ranks` ranks: written through the store, sealed, and read back."""
    store = ResultsStore.open(root, create=True)
    plan = make_plan(parse_sweep(_SWEEP), _MACHINE)
    resolved = _with_ranks(plan.cells[0].resolved, size)
    begun = time.perf_counter()
    run_id = write_run(store, resolved, size, cell="one", repeat=0, code="code")
    written = time.perf_counter()
    record = store.read(run_id)
    read = time.perf_counter()
    assert record.is_whole, record.damage[:3]
    files = sum(1 for _ in store.find(run_id)[1].glob("steps.*"))
    print(
        f"record of {size.ranks:,} ranks x {size.steps} steps in {files:,} files:"
        f" written in {written - begun:.2f} s, read in {read - written:.2f} s"
    )


def measure_status(root: Path, size: Size) -> None:
    """`size.runs` runs of two ranks of one sweep, and its status."""
    store = ResultsStore.open(root, create=True)
    definition = parse_sweep(_SWEEP)
    repeats = -(-size.runs // len(make_plan(definition, _MACHINE).cells))
    plan = make_plan(definition, _MACHINE, repeat=repeats)
    store.write_plan(plan.id, plan.to_document())
    codes = {cell.id: code_identity(cell.resolved) for cell in plan.cells}
    runs = [(cell, repeat) for repeat in range(repeats) for cell in plan.cells][: size.runs]
    for cell, repeat in runs:
        write_run(store, cell.resolved, size, cell=cell.id, repeat=repeat, code=codes[cell.id])
    for what in (None, plan.id):
        begun = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            show_status(root, what, as_json=True)
        taken = time.perf_counter() - begun
        states = [run["state"] for run in json.loads(shown.getvalue())["sweeps"][0]["runs"]]
        print(f"status {what or ''} of {states.count('ok')} finished runs: {taken:.2f} s")


def write_run(
    store: ResultsStore, resolved: ResolvedRun, size: Size, *, cell: str, repeat: int, code: str
) -> str:
    """A whole and sealed record; returns its id."""
    with store.new_run(
        resolved, sweep="many", cell=cell, repeat=repeat, arm=None, code=code
    ) as folder:
        _write_samples(folder.path, resolved, size)
        folder.write_environment({"hostname": "node-0", "runtime": {"torch": "2.13.0"}})
        folder.write_memory({"rank": 0, "by_category_bytes": {"main_weights": 1}})
        folder.finish(folder.status.model_copy(update={"state": "ok"}))
    return folder.run_id


def _write_samples(path: Path, resolved: ResolvedRun, size: Size) -> None:
    steps, ranks = resolved.train.steps, resolved.launch.ranks
    if size.per_rank:
        for rank in range(ranks):
            lines = [_line({}, rank, step) for step in range(1, steps + 1)]
            (path / f"steps.rank{rank}.jsonl").write_text("".join(lines))
        return
    for node in range(-(-ranks // _RANKS_PER_NODE)):
        own = range(node * _RANKS_PER_NODE, min(ranks, (node + 1) * _RANKS_PER_NODE))
        lines = [_line({"rank": r}, r, step) for step in range(1, steps + 1) for r in own]
        (path / f"steps.node{node}.jsonl").write_text("".join(lines))


def _line(first: dict[str, Any], rank: int, step: int) -> str:
    sample = {
        "step": step,
        "milliseconds": 123.4567890123 + 0.001 * rank + 0.1 * (step % 3),
        "loss": 2.3456789012345 + 1.0 / step,
        "grad_norm": 1.2345678901234,
        "learning_rate": 0.0003,
        "tokens": 8192,
        "wire_bytes": 1234567890,
        "rss_bytes": 1234567890,
        "device_peak_bytes": 12345678901,
    }
    return json.dumps(first | sample) + "\n"


def _with_ranks(resolved: ResolvedRun, size: Size) -> ResolvedRun:
    launch = resolved.launch.model_copy(update={"ranks": size.ranks})
    train = resolved.train.model_copy(update={"steps": size.steps})
    return resolved.model_copy(update={"launch": launch, "train": train})


if __name__ == "__main__":
    main()
