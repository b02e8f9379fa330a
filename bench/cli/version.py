"""`--version`: what a report of a fault needs to name."""

from __future__ import annotations

import platform

from bench.launch.code import checkout_root, installed_version
from bench.launch.git import git_state


def version_text() -> str:
    """As `mfsdp-bench 0.1.0 (commit 3c20bcc8a1b2), Python 3.11.7, torch 2.13.0`."""
    own, torch = (installed_version(name) or "none" for name in ("mfsdp-bench", "torch"))
    return f"mfsdp-bench {own}{_commit()}, Python {platform.python_version()}, torch {torch}"


def _commit() -> str:
    state = git_state(checkout_root())
    if state["commit"] is None:
        return ""
    changed = ", with uncommitted changes" if state["dirty"] else ""
    return f" (commit {state['commit'][:12]}{changed})"
