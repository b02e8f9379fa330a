"""The Trainer of Hugging Face: `trainer_state.json`, and the dictionaries that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from bench.importers.parsed import NUMBER, Parsed, Said, Value, renamed, value

_PRINTED = re.compile(r"\{'loss': .*\}")
_FIELD = re.compile(rf"'([^']+)': '?({NUMBER})'?(?=[,}}])", re.IGNORECASE)
# Evaluations and the sums at the end stand among the steps, under the numbers of steps.
_NOT_OF_A_STEP = ("eval_", "train_", "test_")
_NAMES: Mapping[str, tuple[str, float]] = {
    "loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "learning_rate": ("learning_rate", 1.0),
    "memory_allocated (GB)": ("device_allocated_bytes", 2.0**30),
    "max_memory_allocated (GB)": ("device_peak_bytes", 2.0**30),
}
_FACTS = {"framework": "transformers"}


def line(text: str) -> Said | None:
    """What a dictionary that was printed says; None for any other line."""
    found = _PRINTED.search(text)
    if found is None:
        return None
    said = {name: value(one) for name, one in _FIELD.findall(found[0])}
    return Said(None, renamed(said, _NAMES), _FACTS)


def state(text: str) -> Parsed | None:
    """A whole `trainer_state.json`; None where it is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    history = document.get("log_history") if isinstance(document, dict) else None
    if not isinstance(history, list):
        return None
    parsed = Parsed("trainer", workload=dict(_FACTS))
    steps = document.get("max_steps")
    if isinstance(steps, int) and 0 < steps < 2**40:
        parsed.workload["steps"] = steps
    for entry in history:
        if isinstance(entry, dict):
            _entry(parsed, entry)
    return parsed


def _entry(parsed: Parsed, entry: dict[str, object]) -> None:
    step = entry.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return
    of_step: dict[str, Value] = {}
    besides: dict[str, Value] = {}
    for name, one in entry.items():
        if name == "step" or isinstance(one, bool) or not isinstance(one, int | float | str):
            continue
        chosen = besides if name.startswith(_NOT_OF_A_STEP) else of_step
        chosen[name] = value(one) if isinstance(one, str) else _as_float(one)
    if besides:
        parsed.add(Said(step, besides, kind="evaluation"), 0)
    if "loss" in of_step:
        parsed.add(Said(step, renamed(of_step, _NAMES)), 0)


def _as_float(one: float) -> float:
    try:
        return float(one)
    except OverflowError:
        return float("inf")
