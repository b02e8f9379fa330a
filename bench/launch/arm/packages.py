"""Packages of an arm: installed by pip into a folder of their own, put first on the ranks' path.

A folder (`pip install --target`) and not an environment: it lies over the packages of whatever
interpreter the arm uses, so that only what differs is installed. pip also installs what the named
packages depend on, so a pinned torch brings the libraries that it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from bench.errors import UsageError

_TIMEOUT_SECONDS = 3600.0
_SHOWN_CHARACTERS = 400


def installed_packages(pins: tuple[str, ...], python: str, cache: Path, who: str) -> Path:
    """The folder with `pins`, made once per interpreter and pins (for local ones: their content).

    Raises:
        UsageError: pip is missing, or refuses.
    """
    key = [python, *sorted(f"{pin} {_content(pin)}" for pin in pins)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = cache / "packages" / name
    if folder.is_dir():
        return folder
    # Next to its final place, so that an interrupted installation is never taken for a whole one.
    unfinished = folder.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(2)}")
    unfinished.mkdir(parents=True)
    try:
        _install(pins, python, unfinished, who)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def distributions_in(folder: Path) -> dict[str, str]:
    """Name -> version of what is installed in `folder`."""
    return {
        found.metadata["Name"]: found.version
        for found in metadata.distributions(path=[str(folder)])
    }


def _install(pins: tuple[str, ...], python: str, target: Path, who: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--target", str(target), *pins]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{who}: pip could not install {', '.join(pins)}: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = " ".join(errors or done.stderr.splitlines()[-2:])[:_SHOWN_CHARACTERS]
        raise UsageError(f"{who}: pip could not install {', '.join(pins)}: {said}")


def _content(pin: str) -> str:
    """Hash of a local package; empty for a pin that names one of an index."""
    place = Path(pin)
    if not place.exists():
        return ""
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(place)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
