"""Git as tests use it: with an identity of its own, and whatever hook of git calls the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """What a command of git says in `folder`."""
    identity = ("-c", "user.name=somebody", "-c", "user.email=a@example.org")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout.strip()
