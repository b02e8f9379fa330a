"""Why a case cannot run for an engine here, known before anything runs."""

from __future__ import annotations

from typing import Literal

from bench.resolve.import_path import locate
from bench.resolve.machine import Machine
from bench.resolve.rules import broken_rules
from bench.validate.cases import AnyCase
from bench.validate.program import Program
from bench.validate.toy_models import TOY_MODELS


def why_not(
    case: AnyCase, ranks: int, device: Literal["cpu", "cuda"], machine: Machine
) -> str | None:
    """The reason, in words; None for a case that can run.

    An engine given by its import path gets every case: what it cannot do, it refuses itself.
    """
    if case.ranks > ranks:
        return f"needs {case.ranks} ranks, and there are {ranks}"
    if isinstance(case, Program):
        return None if device == "cpu" else "it runs on CPU ranks"
    if ":" in case.engine:
        return None
    run = case.resolved(device)
    reason = TOY_MODELS[case.model].not_for.get(run.engine.name)
    if reason is None:
        reason = next((text for _, text in broken_rules(run, machine)), None)
    if reason is None and case.scenario == "exported" and locate("safetensors") is None:
        return "needs the package safetensors, which is not installed here: pip install safetensors"
    return reason
