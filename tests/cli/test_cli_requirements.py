"""`nccl SWEEP`: what a sweep requires of NCCL's logs, judged from the newest run of each cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import Recorded, record_run

from bench.resolve.resolution import resolve_anywhere
from bench.store import ResultsStore
from sweeps.definition import load_sweep
from sweeps.matrix import expand

SWEEP = """name: kernels
base: {model: {preset: debug}, measure: {nccl: evidence}, launch: {device: cuda}}
matrix: {product: {engine.strategy: [optim_grads, optim_grads_params]}}
require:
  - {when: {engine.strategy: optim_grads_params}, nccl: "AG=sym", after_iteration: 1}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    file = tmp_path / "kernels.yaml"
    file.write_text(SWEEP)
    return file


def measured(sweep: Path, results: Path, kernels: tuple[str, str], **changes: str) -> None:
    """A run of the cell that is required of, whose log shows these kernels in two iterations."""
    cell = expand(load_sweep(sweep).matrix)[1]
    store = ResultsStore(results)
    resolved = resolve_anywhere(cell.spec)
    folder = record_run(store, Recorded(resolved, cell=cell.id, sweep="kernels", **changes))
    logs = folder.path / "nccl"
    logs.mkdir()
    head = "n1:10:20 [0] NCCL INFO "
    comm = "comm 0xa0 rank 0 nranks 2 cudaDev 0 busId 1b commId 0xc - Init COMPLETE"
    parts = [head + comm + "\n" + head + kernels[0] + "\n", head + kernels[1] + "\n"]
    (logs / "rank0.log").write_text("".join(parts))
    ends = [len(parts[0]), len("".join(parts))]
    marks = [json.dumps({"iteration": i, "offset_bytes": end}) for i, end in enumerate(ends, 1)]
    (logs / "iterations.rank0.jsonl").write_text("\n".join(marks) + "\n")


REGULAR = "AllGather: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}"
SYMMETRIC = "AllGather [Symmetric]: 4096 Bytes -> Kernel AllGather_LL nchannels 1 nthreads 512"


@pytest.mark.parametrize(
    ("kernels", "state", "code"),
    [((REGULAR, SYMMETRIC), "met", 0), ((SYMMETRIC, REGULAR), "not met", 1)],
)
def test_a_cell_is_judged_after_its_first_iteration(
    in_process, sweep, tmp_path, kernels, state, code
):
    measured(sweep, tmp_path / "results", kernels)
    ended, out, _ = in_process("nccl", sweep, "--results", tmp_path / "results", "--json")
    assert ended == code
    (row,) = json.loads(out)["requirements"]
    assert (row["cell"], row["requirement"], row["state"]) == (
        "optim_grads_params", "AG=sym", state,
    )  # fmt: skip


def test_what_was_not_measured_is_not_met(in_process, sweep, tmp_path):
    results = tmp_path / "results"
    never, out, _ = in_process("nccl", sweep, "--results", results)
    assert never == 3
    assert "never measured" in out
    measured(sweep, results, (SYMMETRIC, SYMMETRIC), state="crashed", reason="ranks died")
    failed, out, _ = in_process("nccl", sweep, "--results", results)
    assert failed == 3
    assert "ended crashed" in out
    measured(sweep, results, (SYMMETRIC, SYMMETRIC), started="2026-03-02T10:00:00.000Z")
    sweep.write_text(SWEEP.replace("debug}", "debug, layers: 3}"))
    other, out, _ = in_process("nccl", sweep, "--results", results)
    assert other == 3
    assert "another configuration" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SWEEP.partition("require")[0], "requires nothing"),
        (SWEEP.replace("AG=sym", "AG=fast"), "unknown kind 'fast'"),
        (
            SWEEP.replace("when: {engine.strategy: optim_grads_params}", "when: {engine.name: x}"),
            "this requirement matches no cell",
        ),
    ],
)
def test_a_requirement_that_means_nothing_is_refused(in_process, sweep, text, said):
    sweep.write_text(text)
    code, _, err = in_process("nccl", sweep)
    assert code == 2
    assert said in err
