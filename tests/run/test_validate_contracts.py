"""Contracts hold, and one that is broken says which check has failed, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.testing.workers import ForkServer
from bench.validate.contracts.contract_case import CONTRACTS, ContractCase
from bench.validate.mutation import copy_of_core
from bench.validate.session import WorkerSettings, verdicts
from bench.verdict import CaseVerdict

pytestmark = pytest.mark.processes


def judged(
    fork_server: ForkServer, cases: Sequence[ContractCase], core: Path | None = None
) -> list[CaseVerdict]:
    return list(verdicts(fork_server, cases, WorkerSettings(), core=core))


@pytest.mark.nightly
def test_all_contracts_hold(fork_server: ForkServer) -> None:
    for verdict in judged(fork_server, CONTRACTS):
        assert verdict.state == "passed", verdict


def test_a_refusal_comes_before_anything_is_changed(fork_server: ForkServer) -> None:
    """An unknown order of units left weights without memory; a second sharding said nothing."""
    (verdict,) = judged(fork_server, [ContractCase("refusals")])
    assert verdict.state == "passed", verdict


def test_a_broken_contract_says_what_was_expected(fork_server: ForkServer, tmp_path: Path) -> None:
    file = copy_of_core(tmp_path) / "plan" / "layout.py"
    text = file.read_text()
    assert "round_up(cursor, row)" in text
    file.write_text(text.replace("round_up(cursor, row)", "round_up(cursor, row + 1)"))
    (verdict,) = judged(fork_server, [ContractCase("plans", ranks=1)], core=tmp_path)
    (failure,) = verdict.failures
    assert failure.finding is not None
    assert failure.finding.found.startswith("rows of every tensor lie whole in slices: ")


def test_a_contract_needs_its_ranks(fork_server: ForkServer) -> None:
    (verdict,) = verdicts(fork_server, [ContractCase("meshes", 4)], WorkerSettings(ranks=2))
    assert (verdict.state, verdict.reason) == ("not_applicable", "needs 4 ranks, and there are 2")
