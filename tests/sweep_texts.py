"""Sweep files that tests have written as texts."""

from __future__ import annotations

import pytest

from sweeps.definition import SweepDefinition, define
from sweeps.document import SweepFileError, parse_document


def parse_sweep(text: str, source: str = "sweep.yaml") -> SweepDefinition:
    return define(parse_document(text, source))


def refusal(text: str) -> str:
    """What is said of a file `x.yaml` that is none."""
    with pytest.raises(SweepFileError) as caught:
        parse_sweep(text, "x.yaml")
    return str(caught.value)
