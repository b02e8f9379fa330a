"""Cells whose memory cannot fit the devices of a plan; each distinct configuration traced once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from bench.cli import console
from bench.errors import UnsupportedError
from bench.fit.prediction import Prediction, predict
from bench.fit.verdict import Verdict
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from sweeps.plan import Plan, PlannedCell, PrunedCell

RULE: Final = "does-not-fit"
Found = Prediction | UnsupportedError

#: Settings that change no storage and no message.
_NO_MEMORY: Final[Mapping[str, Any]] = {
    "data": True,
    "measure": True,
    "launch": {"env", "timeout_seconds", "hang_seconds", "threads_per_rank", "copy_engine"},
    "train": {"steps", "lr", "warmup_steps", "weight_decay", "beta1", "beta2", "eps", "seed"},
}


class Predictions:
    """Of runs, by what their memory depends on."""

    def __init__(self, *, whole: bool = False, check: bool = True) -> None:
        self._asked = {"whole": whole, "check": check}
        self._found: dict[str, Found] = {}

    def of(self, resolved: ResolvedRun) -> Found:
        """The prediction, or why there is none."""
        key = resolved.model_dump_json(exclude=dict(_NO_MEMORY))
        if key not in self._found:
            try:
                self._found[key] = predict(resolved, **self._asked)
            except UnsupportedError as error:
                self._found[key] = error
        found = self._found[key]
        return replace(found, resolved=resolved) if isinstance(found, Prediction) else found


def without_what_cannot_fit(plan: Plan, machine: Machine) -> tuple[Plan, dict[str, Found]]:
    """`plan` with cells pruned that no device of `machine` holds, and what was found of each.

    A cell of several arms is pruned where one of them does not fit; its arms are found as
    `cell arm`. What cannot be traced stays.
    """
    predictions = Predictions(check=False)
    kept: list[PlannedCell] = []
    pruned: list[PrunedCell] = []
    memory: dict[str, Found] = {}
    for cell in plan.cells:
        console.waiting(f"predicting the memory of {cell.id}")
        found = dict(_of_arms(cell, predictions))
        reasons = [
            f"arm {arm}: {reason}" if arm else reason
            for arm, one in found.items()
            if (reason := _reason(one, machine))
        ]
        memory |= {cell.name_of(arm): one for arm, one in found.items()}
        if reasons:
            pruned.append(PrunedCell(cell.id, cell.labels, RULE, reasons[0]))
        else:
            kept.append(cell)
    console.waiting("")
    return replace(plan, cells=tuple(kept), pruned=(*plan.pruned, *pruned)), memory


def _of_arms(cell: PlannedCell, predictions: Predictions) -> Iterator[tuple[str, Found]]:
    for arm, resolved in cell.runs.items():
        if resolved.launch.device != "cuda":
            yield arm, UnsupportedError("fit-cpu", "it runs on a CPU")
        elif resolved.factory is not None:
            yield arm, UnsupportedError("fit-factory", "a plan builds no model of the user's own")
        elif resolved.engine.setting("recipe") not in (None, "none"):
            yield arm, UnsupportedError("fit-recipe", "a plan traces no codec, which takes minutes")
        else:
            yield arm, predictions.of(resolved)


def _reason(found: Found, machine: Machine) -> str | None:
    verdict = Verdict.of(found, machine) if isinstance(found, Prediction) else None
    if verdict is None or (verdict.fits and verdict.setup_fits):
        return None
    return verdict.setup_text() if verdict.fits else verdict.text()


def memory_document(found: Found) -> dict[str, Any]:
    """For `plan --json`."""
    if isinstance(found, UnsupportedError):
        return {"refusal": found.reason}
    names = ("peak_bytes", "setup_bytes", "by_category", "peak_moment")
    document = found.to_document()
    return {name: document[name] for name in names}
