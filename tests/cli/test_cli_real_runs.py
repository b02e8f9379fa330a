"""Sweeps with real ranks through the real command line: report, resume, trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.store import ResultsStore

GOOD = {"ok", "unstable"}  # on a busy machine a short run may find no steady state


@pytest.mark.processes
def test_a_sweep_from_file_to_report(cli, fast, in_process):
    path = cli.sweep(fast + "matrix: {product: {engine.name: [mfsdp], launch.ranks: [2]}}\n")
    done = cli.run("run", path, "--report")
    ((cell, state),) = cli.runs()
    assert state in GOOD, done.stderr
    assert done.returncode == (0 if state == "ok" else 3), done.stderr
    # The table of results comes with and without a report, the report's path is the last line.
    assert re.search(rf"\W {cell} +1 {state} .*MiB", done.stdout), done.stdout
    assert "<svg" in Path(done.stdout.splitlines()[-1]).read_text()

    code, out, err = in_process("run", path)
    assert code == done.returncode
    assert "(0 now, 1 before)" in err
    assert f" {cell} " in out


OWN_ENGINE = """\
from toy_engine import FlatReduce


def build(model, resolved, device):
    import helper.lazily  # as late as the ranks can

    return FlatReduce(model, resolved, device)
"""
SWEEP_OF_OWN = """\
name: own
base:
  engine.name: "engine_of_mine:build"
  engine.strategy: no_shard
  data: {kind: text, path: words.txt}
  train: {steps: 4, global_batch: 2, micro_batch: 1, seq_len: 16}
  model: {preset: debug}
  launch: {ranks: 2}
"""


@pytest.mark.processes
def test_a_run_counts_only_while_what_its_ranks_imported_and_read_is_unchanged(cli, in_process):
    toy = Path(__file__).parents[1] / "run" / "toy_engine.py"
    helper = cli.folder / "helper"
    helper.mkdir()
    files = {
        cli.folder / "toy_engine.py": toy.read_text(),
        cli.folder / "engine_of_mine.py": OWN_ENGINE,
        helper / "__init__.py": "",
        helper / "lazily.py": "SCALE = 1.0\n",
        cli.folder / "words.txt": "some words to train on, over and over again. " * 50,
    }
    for path, text in files.items():
        path.write_text(text)
    sweep = cli.sweep(SWEEP_OF_OWN)
    done = cli.run("run", sweep)
    (record,) = cli.records()
    assert record.status.state in GOOD, done.stderr
    assert set(record.status.inputs) == {str(p) for p in files if p.name != "engine_of_mine.py"}

    def is_current() -> bool:
        _, out, _ = in_process("status", "own", "--json")
        (run,) = json.loads(out)["sweeps"][0]["runs"]
        return run["current"]

    assert is_current()
    for path in (cli.folder / "toy_engine.py", cli.folder / "words.txt", helper / "lazily.py"):
        path.write_text(files[path] + "# x\n")
        assert not is_current(), path
        code, _, err = in_process("gate", sweep, "--against", "own")
        assert code == 5
        assert f"was measured before {path} changed" in err
        if path.name != "lazily.py":
            path.write_text(files[path])
    again = cli.run("run", sweep).stderr
    assert f"again: base: {helper / 'lazily.py'} changed since" in again
    assert "1 now, 0 before" in again


TRACED = """\
name: traced
base:
  model: {preset: debug}
  data: {kind: markov}
  engine: {name: mfsdp, strategy: optim_grads_params}
  train: {steps: 6, global_batch: 4, micro_batch: 1, seq_len: 16}
  measure: {profile: torch}
  launch: {ranks: 2, hang_seconds: 60.0, timeout_seconds: 120.0}
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_a_profiled_run_leaves_traces_and_what_was_exposed(cli):
    done = cli.run("run", cli.sweep(TRACED), "--report", timeout=200)
    assert done.returncode in {0, 3}, done.stderr  # 3: a profiled run has no times
    (record,) = ResultsStore.open(cli.folder / "results", create=False).records()
    assert not record.status.comparable_in_time
    found = record.environment["runtime"]["communication"]
    # Ranks of one host read each other's memory, or exchange messages where they may not.
    assert found["exchange" if "exchange" in found else "recv"]["count"] > 10
    assert 0 <= found["all"]["exposed_milliseconds"] <= found["all"]["milliseconds"]
    traces = sorted((cli.folder / "results" / "runs").rglob("trace.rank*.json"))
    assert [trace.name for trace in traces] == ["trace.rank0.json", "trace.rank1.json"]
    names = [event.get("name") for event in json.loads(traces[1].read_text())["traceEvents"]]
    for part in ("microbatch 1", "microbatch 2", "clip", "update"):
        assert names.count(f"mfsdp-bench: {part}") == 3
    (page,) = (cli.folder / "results").rglob("report.html")
    assert "Exposed communication" in page.read_text()
