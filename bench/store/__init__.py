"""Runs on disk: one folder per run, written atomically, read tolerantly. Torch-free."""

from __future__ import annotations

from bench.store.results_store import DamagedRun, ResultsStore
from bench.store.run_folder import RunFolder

__all__ = ["DamagedRun", "ResultsStore", "RunFolder"]
