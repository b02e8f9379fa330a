"""What is told in one place: strategies and who compares them, the default transport, padding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter

from bench.spec import DEFAULT_TRANSPORT, SHARDED, OuterStrategyName, StrategyName
from bench.spec.names import TransportName
from bench.validate.checks import collectives
from mfsdp_core.plan import options
from mfsdp_core.plan.layout import PADDING_BUDGET
from mfsdp_core.plan.strategy import INNER, OUTER, Placement

ROOT = Path(__file__).parents[2]
#: It chooses cases by name, and concludes nothing from a name.
CHOOSES = {"bench/validate/matrix.py"}


def compared(file: Path) -> Iterator[str]:
    """Strings that a file compares with something."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield from (n.value for n in ast.walk(side) if isinstance(n, ast.Constant))


def test_no_file_compares_the_name_of_a_strategy() -> None:
    """It asks what is sharded: `AxisPlacements` in the core, `SHARDED` in the harness."""
    found = [
        str(file.relative_to(ROOT))
        for package in ("bench", "mfsdp_core", "reports", "sweeps")
        for file in (ROOT / package).rglob("*.py")
        if {*SHARDED} & {name for name in compared(file) if isinstance(name, str)}
    ]
    assert set(found) == CHOOSES


@pytest.mark.parametrize(("names", "rows"), [(StrategyName, INNER), (OuterStrategyName, OUTER)])
def test_harness_and_core_know_the_same_strategies(names: object, rows: dict[str, object]) -> None:
    assert get_args(names) == tuple(rows)
    assert tuple(SHARDED) == get_args(StrategyName)
    for name, row in INNER.items():
        placed = {
            "optimizer": row.optimizer,
            "gradients": row.accumulator,
            "weights": row.parameter,
        }
        assert SHARDED[name] == {part for part, at in placed.items() if at is Placement.FLAT}


def test_harness_and_core_have_the_same_padding_transports_and_default() -> None:
    assert collectives.PADDING_BUDGET == PADDING_BUDGET
    asked: object = TypeAdapter(TransportName).json_schema()["enum"]
    assert asked == [*get_args(options.Transport)]
    assert DEFAULT_TRANSPORT == options.DEFAULT_TRANSPORT
