"""The tables of docs/run-states.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from rule_cases import RULE_IDS

from bench.record import RunState
from bench.resolve.device_rules import MAX_THREADS_PER_CORE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "run-states.md").read_text()


def first_column(heading: str) -> list[str]:
    """Names in backquotes that start the rows of the first table behind `heading`."""
    table = PAGE.split(heading, maxsplit=1)[1].split("\n\n#", maxsplit=1)[0]
    return re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)


def test_the_table_of_rules_lists_every_rule_in_its_order() -> None:
    assert first_column("## Why a run cannot start here") == RULE_IDS


def test_the_table_of_states_lists_every_state() -> None:
    assert sorted(first_column("## Life of a run")) == sorted(get_args(RunState))


def test_the_bound_on_threads_per_core_is_the_documented_one() -> None:
    assert f"more than {MAX_THREADS_PER_CORE} threads per core" in PAGE
