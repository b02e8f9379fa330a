"""With --json, stdout is one JSON document: for every verb, and every row of docs/exit-codes.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outcome_scenarios import SCENARIOS, World
from test_cli_outcomes import table


def rows() -> list[Any]:
    """A row of each verb that ends well, one that does not, and every exit code; others nightly."""
    seen: set[tuple[str, bool] | int] = set()
    found = []
    for row in table():
        verb, _, code = row.values
        kinds = {(verb, code == 0), code}
        nightly = kinds <= seen
        seen |= kinds
        marks = [pytest.mark.nightly] if nightly else []
        found.append(pytest.param(*row.values, id=row.id, marks=marks))
    return found


@pytest.mark.parametrize(("verb", "outcome", "code"), rows())
def test_every_command_of_a_row_prints_json_alone(world: World, verb, outcome, code):
    plain, wrong = world.run, []
    ran: list[tuple[object, ...]] = []

    def run(*arguments: object) -> int:
        ended = plain(*arguments, *(() if "--json" in arguments else ("--json",)))
        ran.append(arguments)
        try:
            json.loads(world.out)
        except ValueError:
            wrong.append(f"{arguments}: exit code {ended}, {world.out[:200]!r}")
        return ended

    world.run = run
    try:
        SCENARIOS[verb, outcome](world)
    except (AssertionError, LookupError, ValueError, AttributeError, OSError):
        assert ran  # what follows reads the words that are meant for people
    assert wrong == []


def test_a_refusal_says_why_and_with_which_exit_code(in_process):
    code, out, err = in_process("plan", "none.yaml", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (2, 2)
    assert f"error: {document['error']}" == err.strip()
