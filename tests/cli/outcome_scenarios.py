"""Scenarios of docs/exit-codes.md: each brings one outcome about, by (verb, outcome)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TWO_CELLS = "name: two\nmatrix: {product: {engine.name: [ddp, mfsdp]}}\n"

World = Any  # the fixture `world` of conftest.py
Scenario = Callable[[World], int]
SCENARIOS: dict[tuple[str, str], Scenario] = {}


def scenario(verb: str, *outcomes: str) -> Callable[[Scenario], Scenario]:
    """Register a function that returns the exit code of `verb` where one of `outcomes` holds."""

    def register(function: Scenario) -> Scenario:
        for outcome in outcomes:
            SCENARIOS[verb, outcome] = function
        return function

    return register


class Row(NamedTuple):
    """One command.

    asked: its words, those with a line end being the text of a sweep file. says: stands in what is
    printed. ran: cell -> state of the runs of `two` before, None for no run; of `run` its own runs.
    """

    asked: tuple[object, ...]
    says: tuple[str, ...] = ()
    ran: Mapping[str, str] | None = None


def scenarios(verb: str, rows: Mapping[str, tuple[Row, ...]]) -> None:
    """Register outcomes of `verb` by their commands, of which the last one gives the code.

    Those before it end as it does.
    """
    for outcome, commands in rows.items():

        def told(world: World, commands: tuple[Row, ...] = commands) -> int:
            codes = set()
            for row in commands:
                if row.ran is not None and verb == "run":
                    world.states = dict(row.ran)
                elif row.ran is not None:
                    world.sweep(**row.ran)
                asked = (world.file(w) if "\n" in str(w) else w for w in row.asked)
                codes.add(world.run(verb, *asked))
                for words in row.says:
                    assert words in world.out + world.err
            (code,) = codes
            return code

        scenario(verb, outcome)(told)
