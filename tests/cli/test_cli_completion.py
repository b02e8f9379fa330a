"""What a shell completes: verbs and choices, and nothing is printed that it would not expect."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("line", "expected"),
    [("ga", ["gate"]), ("baseline pro", ["promote"]), ("lint --format g", ["github"])],
)
def test_completes(in_process, monkeypatch, line, expected):
    monkeypatch.setenv("_MFSDP_BENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"mfsdp-bench {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    code, out, err = in_process()
    assert (code, out.split(), err) == (0, expected, "")
