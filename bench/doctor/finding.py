"""One line of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class DoctorFinding:
    """level: `note` is a capability that is absent or a doubt, `problem` keeps runs from starting.

    gives: what the missing piece would give. remedy: how to get it, a command where there is one.
    """

    level: Level
    what: str
    found: str
    gives: str = ""
    remedy: str = ""
