"""Why a case cannot run for an engine here, known before anything runs."""

from __future__ import annotations

from typing import Literal

from bench.resolve.import_path import locate
from bench.resolve.machine import Machine
from bench.resolve.rules import broken_rules
from bench.validate.cases import Case
from bench.validate.toy_models import TOY_MODELS


def needs_ranks(needed: int, there: int) -> str:
    """The reason of a case that is too large."""
    return f"needs {needed} ranks, and there are {there}"


def why_not(case: Case, ranks: int, device: Literal["cpu", "cuda"], machine: Machine) -> str | None:
    """The reason, in words; None for a case that can run.

    An engine given by its import path gets every case: what it cannot do, it refuses itself.
    """
    if case.ranks > ranks:
        return needs_ranks(case.ranks, ranks)
    if ":" in case.engine:
        return None
    run = case.resolved(device)
    reason = TOY_MODELS[case.model].not_for.get(run.engine.name)
    if reason is not None:
        return reason
    broken = next(broken_rules(run, machine), None)
    if broken is not None:
        return broken[1]
    if case.scenario == "exported" and locate("safetensors") is None:
        return "needs the package safetensors, which is not installed here: pip install safetensors"
    return None
