"""Scenarios of docs/exit-codes.md: each brings one outcome about, by (verb, outcome)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
