"""A finding about a rank of a hybrid mesh says where the rank is."""

from __future__ import annotations

import pytest

from bench.validate.cases import Case
from bench.validate.judge import _placed
from bench.verdict import CheckVerdict, Finding


def verdict(rank: int | None) -> CheckVerdict:
    return CheckVerdict(check="volume", state="failed", finding=Finding(step=1, rank=rank))


def test_both_axes_and_the_node_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    case = Case("mfsdp", "optim_grads_params", ranks=4, outer=2)
    found = _placed(verdict(2), case).finding
    assert found is not None
    assert found.place == "step 1, rank 2 (outer 1, inner 0, on n7)"


def test_nothing_is_added_where_there_is_one_axis_or_no_rank() -> None:
    flat = Case("mfsdp", "optim_grads_params", ranks=4)
    assert _placed(verdict(2), flat) == verdict(2)
    assert _placed(verdict(None), Case("mfsdp", "optim", ranks=4, outer=2)) == verdict(None)
