"""Sweep files that tests have written as texts."""

from __future__ import annotations

from sweeps.definition import SweepDefinition, define
from sweeps.document import parse_document


def parse_sweep(text: str, source: str = "sweep.yaml") -> SweepDefinition:
    return define(parse_document(text, source))
