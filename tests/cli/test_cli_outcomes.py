"""Walks the table of verb, outcome and exit code in outcomes.md. Runs are stood in for."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import outcomes_of_gates
import outcomes_of_other_code
import outcomes_of_reading
import outcomes_of_runs
import pytest
from outcome_scenarios import World, play

from bench.cli.exit_codes import worst

TABLE = Path(__file__).with_name("outcomes.md")
ROW = re.compile(r"^\| (?P<verb>\w+) \| (?P<outcome>[^|]+) \| (?P<code>\d+) \|$", re.MULTILINE)
ROWS = {(m["verb"], m["outcome"].strip()): int(m["code"]) for m in ROW.finditer(TABLE.read_text())}
MODULES = (outcomes_of_gates, outcomes_of_other_code, outcomes_of_reading, outcomes_of_runs)


def scenarios_of(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in MODULES:
        found |= getattr(module, verb.upper(), {})
    return found


@pytest.mark.parametrize(("verb", "outcome"), ROWS, ids=lambda text: text)
def test_the_outcome_has_the_exit_code_of_the_table(world: World, verb, outcome):
    code = ROWS[verb, outcome]
    assert play(world, scenarios_of(verb)[outcome]) == code, world.err
    if code == 2:
        assert "Traceback" not in world.err


def test_the_table_and_the_scenarios_have_the_same_rows_for_every_verb(in_process):
    listed = in_process("--help")[1].partition("Commands:\n")[2]
    assert "..." not in listed.replace("[ARGS]...", ""), "a line is cut off"
    verbs = set(re.findall(r"^  (\w+)  ", listed, re.MULTILINE))
    assert verbs == {
        *("run", "plan", "fit", "validate", "gate", "compare", "report", "nccl", "import"),
        *("export", "baseline", "status", "doctor", "schema"),
    }
    verbs -= {"schema"}  # prints a constant
    told = {(verb, outcome) for verb in {"any", *verbs} for outcome in scenarios_of(verb)}
    assert told == set(ROWS)
    assert verbs < {verb for verb, _ in ROWS}


def test_a_refusal_says_why_and_with_which_exit_code(in_process):
    code, out, err = in_process("plan", "none.yaml", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (2, 2)
    assert f"error: {document['error']}" == err.strip()


def test_of_two_exit_codes_the_stronger_one_stands():
    assert worst([]) == 0
    for stronger, weaker in itertools.combinations([130, 6, 2, 3, 1, 5, 4, 0], 2):
        assert worst([weaker, stronger]) == worst([stronger, weaker]) == stronger
