"""Results folders for the tests of derived numbers and reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import fill_quickstart

from bench.cli.verb import PolicyOption
from bench.store import ResultsStore
from reports.compare.policy import Policy


@pytest.fixture(scope="session")
def quickstart_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A filled results folder shared by tests that only read it."""
    root = tmp_path_factory.mktemp("shared") / "results"
    fill_quickstart(ResultsStore.open(root, create=True))
    return root


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[str], Policy]:
    """`policy(text)`: the policy of a file `gates.yaml` with this text."""

    def read(text: str) -> Policy:
        path = tmp_path / "gates.yaml"
        path.write_text(text)
        return PolicyOption(policy=path).rules()

    return read
