"""What a shell completes: verbs and choices, and nothing is printed that it would not expect."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ga", ["gate"]),
        ("baseline pro", ["promote"]),
        ("compare --format m", ["md"]),
        ("plan pr3067_n", ["pr3067_nan_check_cpu", "pr3067_nodes"]),
        ("run mine", ["mine.yaml"]),
        ("plan below/", ["below/theirs.yaml"]),
        ("report ni", ["nightly"]),
        ("status --results kept cell-1234/", ["cell-1234/20261127-ab12"]),
        ("compare n", ["nightly", "nccl_offload"]),
    ],
)
def test_completes(in_process, monkeypatch, tmp_path, line, expected):
    for folder in ("below", "results/sweeps/nightly", "kept/runs/cell-1234/20261127-ab12"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("mine.yaml", "mine.txt", "below/theirs.yaml"):
        (tmp_path / file).touch()
    monkeypatch.setenv("_MFSDP_BENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"mfsdp-bench {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    code, out, err = in_process()
    assert (code, out.split(), err) == (0, expected, "")
