"""The files of the repository, and what is in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    """Every file that is committed or about to be: ignored ones are no part of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def text_of(path: Path) -> str:
    """The file's text; undecodable bytes are replaced, for patterns in ASCII only."""
    return path.read_text(encoding="utf-8", errors="replace")
