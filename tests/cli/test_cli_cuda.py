"""A sweep on one CUDA device, through the real command line. Skipped with a reason elsewhere."""

from __future__ import annotations

import pytest

from bench.store import ResultsStore

pytestmark = pytest.mark.gpu

# Both engines start from the same weights and see the same batches.
SWEEP = """\
name: cuda
base:
  model: {preset: debug}
  data: {kind: markov}
  train: {steps: 12, global_batch: 2, micro_batch: 1, seq_len: 16}
  launch: {ranks: 1, device: cuda, hang_seconds: 120.0, timeout_seconds: 240.0}
matrix: {product: {engine.name: [single, mfsdp]}}
"""


def test_one_rank_of_the_core_trains_on_a_device_as_plain_torch_does(cli):
    done = cli.run("run", cli.sweep(SWEEP), timeout=560)
    assert done.returncode in {0, 3}, done.stderr  # 3: too short for a steady state
    records = list(ResultsStore.open(cli.folder / "results", create=False).records())
    losses = {record.resolved.engine.name: record.losses for record in records}
    assert set(losses) == {"single", "mfsdp"}, done.stderr
    assert len(losses["mfsdp"]) == 12, done.stderr
    assert losses["mfsdp"] == pytest.approx(losses["single"], rel=1e-4)
    assert all(record.steps[0][-1].device_peak_bytes for record in records)
