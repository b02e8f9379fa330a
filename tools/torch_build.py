"""A Python with another torch than ours, made once and kept outside of the tree.

    python -m tools.torch_build 2.11.0            prints its interpreter
    python -m tools.torch_build 2.11.0 --cuda     of its CUDA build in any case
    python -m tools.torch_build 2.11.0 --kept     only where it has been made before

A CPU build is taken where pip finds one. Else a CUDA build is, about 4 GB with what its import
loads; it computes on a CPU as well. Everything else has the versions of `constraints.txt`. Exit
code 3: it cannot be had here, for the reason that is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_LONGEST_SECONDS = 600
_NEEDED_BYTES = 8 << 30
#: Of torch's own requirements, what neither its import nor a step on a CPU loads: 200 MB.
_UNNEEDED = ("triton", "cuda-bindings", "cuda-pathfinder")
#: For the tests of the core, beside torch and what the project itself requires.
_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "safetensors", "pyarrow")
_REQUIRED = """
import importlib.metadata as metadata
print("\\n".join(r for r in metadata.requires("torch") if "extra ==" not in r))
"""


class NotServedError(Exception):
    """Why there is no such build here."""


def interpreter(version: str, *, cuda: bool, cache: Path, kept: bool = False) -> Path:
    """The Python of a kept environment, which is made where it is not there, unless `kept`.

    Raises:
        NotServedError: it is to be kept and is not; pip does not find it, or not in time, or the
            disk is full.
    """
    python_version = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = cache / f"torch-{version}-{'cuda' if cuda else 'cpu'}-{python_version}"
    other = cache / f"torch-{version}-cpu-{python_version}"
    if cuda and (other / "ready").exists() and any(other.glob("lib/*/site-packages/nvidia")):
        folder = other  # pip had no CPU build
    python, ready = folder / "bin" / "python", folder / "ready"
    options = _asked()
    if (
        ready.exists() and ready.read_text() != options
    ):  # other packages than torch have moved since
        _Pip(folder, version).add_requirements()
        ready.write_text(options)
    if not ready.exists():
        if kept:
            raise NotServedError(f"torch {version} is not kept in {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if free < _NEEDED_BYTES:
            raise NotServedError(
                f"{cache} has {free >> 30} GiB free, and torch {version} may need "
                f"{_NEEDED_BYTES >> 30}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        try:
            pip = _Pip(folder, version)
            pip.make(cuda=cuda)
            pip.add_requirements()
        except NotServedError:
            shutil.rmtree(folder)
            raise
        ready.write_text(options)
    return python


class _Pip:
    """What is done to one environment, in one limit of time."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._version = folder, version
        self._python = str(folder / "bin" / "python")
        self._install = [self._python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        self._end = time.monotonic() + _LONGEST_SECONDS

    def make(self, *, cuda: bool) -> None:
        """The environment, with torch alone."""
        self._run(sys.executable, "-m", "venv", str(self._folder))
        # Three equals signs: else a CPU build, where there is one, counts as the newer of the two.
        names = (f"torch=={self._version}+cpu", f"torch==={self._version}")[cuda:]
        for name in names:
            try:
                self._run(*self._install, "--no-deps", name)
                break
            except NotServedError:
                if name == names[-1]:
                    raise

    def add_requirements(self) -> None:
        """What torch and the project require, and what the tests take."""
        constraints = self._folder / "constraints.txt"
        constraints.write_text(_pinned())
        options = [self._python, "-c", _REQUIRED]
        said = subprocess.run(options, check=True, capture_output=True, text=True)
        required = [one for one in said.stdout.splitlines() if not one.startswith(_UNNEEDED)]
        self._run(*self._install, "--constraint", str(constraints), *required, *packages())
        self._run(self._python, "-c", "import torch")

    def _run(self, *command: str) -> None:
        left = max(1.0, self._end - time.monotonic())
        try:
            subprocess.run(command, check=True, timeout=left, capture_output=True, text=True)
        except subprocess.TimeoutExpired as error:
            limit = f"{_LONGEST_SECONDS} s"
            raise NotServedError(f"torch {self._version} has not come in {limit}") from error
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise NotServedError(f"torch {self._version}: {last}") from error


def _pinned() -> str:
    pinned = (_ROOT / "constraints.txt").read_text()
    return re.sub(r"^(torch|setuptools)==.*\n", "", pinned, flags=re.MULTILINE)


def _asked() -> str:
    """What an environment is to have beside torch, as its file `ready` keeps it."""
    return "\n".join((*packages(), _pinned()))


def packages() -> list[str]:
    """What such an environment has beside torch and what torch requires."""
    import tomllib

    document = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    required = document["project"]["dependencies"]
    return [*(one for one in required if not one.startswith("torch")), *_TOOLS]


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--kept", action="store_true", help="make none that is not there")
    options = parser.parse_args(arguments)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        cache = home / "mfsdp-bench"
        print(interpreter(options.version, cuda=options.cuda, cache=cache, kept=options.kept))
    except NotServedError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
