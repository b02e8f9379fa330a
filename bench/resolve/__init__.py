"""From what the user wants to a run that can start, or to a reason why not. Torch-free."""

from __future__ import annotations

from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.resolve.rules import RULES, broken_rules

__all__ = ["RULES", "Machine", "broken_rules", "resolve"]
