"""What an importer makes of a log."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from bench.workload import ImportedStep

NUMBER = r"[-+]?(?:nan|inf|[\d.,]+(?:e[-+]?\d+)?)"


@dataclass
class Parsed:
    """workload: fields of `Workload` that the log tells. remarks: what a reader must know of it.

    steps: by their number; of a step that stands more than once the last line counts, since a run
    that was resumed repeats some.
    """

    workload: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, ImportedStep] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    def add(self, step: ImportedStep) -> None:
        """Keep a step; the last of its number counts."""
        if step.step in self.steps and step != self.steps[step.step]:
            self.repeated.add(step.step)
        self.steps[step.step] = step


def number_after(line: str, label: str) -> float | None:
    """The number behind `label:`; None where there is none that can be read."""
    found = re.search(rf"{re.escape(label)}:?\s*({NUMBER})", line, re.IGNORECASE)
    return None if found is None else number(found[1])


def number(text: str) -> float | None:
    """A number as logs print it, with commas between thousands."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
