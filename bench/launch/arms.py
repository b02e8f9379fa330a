"""From what is wanted of arms to the code that their ranks will run, or one clear refusal."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench.errors import UsageError
from bench.launch.code import OWN_PACKAGES, RANK_PATTERNS, CodeIdentity, RankCode, checkout_root
from bench.launch.git import commit_of, git_state, worktree
from bench.launch.probe import check_engines, probe, unknown_settings
from bench.launch.rank_entry.mfsdp_bench_rank import combined, file_hashes
from bench.spec import ResolvedRun
from bench.store.atomic import reporting_failed_writes
from bench.store.file_lock import FileLock, holder_of

_PIP_SECONDS: Final = 3600.0
_SHOWN_CHARACTERS: Final = 400


@dataclass(frozen=True)
class ArmRequest:
    """One named side of a comparison.

    git: a ref of `repo` (None: the repository of this checkout). checkout: a folder, unchanged.
    With neither, the working tree that this process runs from. python: interpreter of
    the ranks. packages: what pip installs for this arm alone, as pip understands it. settings: of
    a run, full path to value, that this arm's runs have on top of their cell's.
    """

    name: str
    git: str | None = None
    repo: Path | None = None
    checkout: Path | None = None
    python: Path | None = None
    packages: tuple[str, ...] = ()
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def has_own_code(self) -> bool:
        """Whether its ranks run other code than the working tree, or may."""
        return bool(self.git or self.checkout or self.python or self.packages)

    def described(self) -> str:
        """The arm in a few words, without any path."""
        place = "working tree"
        if self.git is not None:
            place = f"git {self.git}" + (f" of {self.repo.name}" if self.repo else "")
        elif self.checkout is not None:
            place = f"checkout {self.checkout.name}"
        parts = [place] + ["its own interpreter"] * (self.python is not None)
        parts += [Path(pin).name for pin in self.packages]
        return ", ".join([*parts, *(f"{path}={value}" for path, value in self.settings.items())])


def prepare_arms(
    requests: Sequence[ArmRequest], cells: Mapping[str, Mapping[str, ResolvedRun]], cache: Path
) -> tuple[RankCode, ...]:
    """Make checkouts and install packages below `cache`, where they are not there yet, and pin all.

    Args:
        requests: the arms, in order.
        cells: arm -> what it will run; its `bench` must be able to read that.
        cache: a folder of the results folder.

    Raises:
        UsageError: an arm cannot be what is wanted. Nothing has been run.
        StoreFullError: no space.
    """
    for request in requests:
        _check_paths(request)
    with reporting_failed_writes(cache):
        cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / "preparing.lock")
    if not lock.acquire("another run"):
        raise UsageError(
            f"{holder_of(lock.path) or 'another run'} is preparing arms in {cache}; wait for it"
        )
    try:
        with reporting_failed_writes(cache):
            return tuple(_prepare(request, cells[request.name], cache) for request in requests)
    finally:
        lock.release()


def _check_paths(request: ArmRequest) -> None:
    """What can be seen without making anything, for all arms before the first is made."""
    who = f"arm {request.name}"
    if request.git is not None:
        commit_of(request.repo or checkout_root(), request.git, who)
    if request.checkout is not None and not request.checkout.is_dir():
        raise UsageError(f"{who}: there is no folder {request.checkout}; expected a checkout")
    if request.python is not None and shutil.which(request.python) is None:
        raise UsageError(
            f"{who}: {request.python} is no program that can be run; expected a Python interpreter"
        )


def _prepare(request: ArmRequest, cells: Mapping[str, ResolvedRun], cache: Path) -> RankCode:
    who = f"arm {request.name}"
    named = shutil.which(request.python) if request.python else None
    # Not resolved: the link in a virtual environment is what makes it one.
    python = str(Path(named).absolute()) if named else sys.executable
    folder = request.checkout or checkout_root()
    if request.git is not None:
        repository = request.repo or checkout_root()
        folder = worktree(repository, commit_of(repository, request.git, who), cache, who)
    folder = folder.resolve()
    root, paths, packages = _layout(folder, who)
    installed: dict[str, dict[str, Any]] = {}
    if request.packages:
        target = _installed_packages(request.packages, python, cache, who)
        paths = (target, *paths)
        for distribution in metadata.distributions(path=[str(target)]):
            entry = {"version": distribution.version, "folder": str(target.resolve())}
            installed[distribution.metadata["Name"]] = entry
    code = RankCode(root, python, request.name, paths)
    check_engines(code, cells)
    answer = probe(code, cells=cells, packages=packages, distributions=installed)
    roots = dict.fromkeys(OWN_PACKAGES, root) | dict.fromkeys(
        packages, paths[-1] if paths else root
    )
    for name, expected in roots.items():
        if (place := answer["packages"][name]["root"]) != str(expected):
            raise UsageError(
                f"{who}: {python} would import {name} from {place}, expected {expected}; remove"
                " what puts the other one first"
            )
    state = git_state(folder)
    pinned = CodeIdentity(
        file_hashes(root, RANK_PATTERNS),
        answer["torch"],
        answer["python"],
        commit=state["commit"],
        dirty_hash=state["dirty_hash"],
        packages={
            name: {
                "patterns": [f"{name}/**/*.py"],
                "root": str(roots[name]),
                "files": answer["packages"][name]["files"],
            }
            for name in packages
        },
        distributions=installed,
        versions=answer["versions"],
    )
    unknown = unknown_settings(answer["unreadable"], cells, who)
    return replace(code, pinned=pinned, unknown_settings=unknown)


def _layout(folder: Path, who: str) -> tuple[Path, tuple[Path, ...], tuple[str, ...]]:
    """The checkout whose `bench` the ranks of an arm run, and what they only import from `folder`.

    That is a folder for their path, and the packages in it.
    """
    if (folder / "bench" / "launch" / "agent.py").is_file():
        return folder, (), ()
    if (folder / "bench").is_dir():
        raise UsageError(
            f"{who}: the `bench` in {folder} cannot run ranks (it has no launch/agent.py), and"
            " would hide this one; choose a later commit"
        )
    place = folder / "src" if (folder / "src").is_dir() else folder
    packages = tuple(sorted(init.parent.name for init in place.glob("[!.]*/__init__.py")))
    if not packages:
        raise UsageError(
            f"{who}: {folder} holds no Python package; expected a checkout of this project or of an"
            " engine"
        )
    return checkout_root(), (place,), packages


def _installed_packages(pins: tuple[str, ...], python: str, cache: Path, who: str) -> Path:
    """The folder with `pins`, made once per interpreter and pins (for local ones: their content).

    A folder (`pip install --target`) and not an environment: it lies over the packages of whatever
    interpreter the arm uses, so that only what differs is installed. pip also installs what the
    named packages depend on, so a pinned torch brings the libraries that it needs.

    Raises:
        UsageError: pip is missing, or refuses.
    """
    key = [python, *sorted(f"{pin} {_content(Path(pin))}" for pin in pins)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = cache / "packages" / name
    if folder.is_dir():
        return folder
    # Next to its final place, so that an interrupted installation is never taken for a whole one.
    unfinished = folder.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(2)}")
    unfinished.mkdir(parents=True)
    try:
        refusal = _pip(pins, python, unfinished)
        if refusal:
            raise UsageError(f"{who}: pip could not install {', '.join(pins)}: {refusal}")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _pip(pins: tuple[str, ...], python: str, target: Path) -> str:
    """Install into `target`; why not, empty if it is done."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--target", str(target), *pins]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PIP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR")]
    said = " ".join(errors or lines[-2:])[:_SHOWN_CHARACTERS]
    return "" if done.returncode == 0 else said or f"exit code {done.returncode}"


def _content(place: Path) -> str:
    """Hash of a local package; empty for a pin that names one of an index."""
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    return combined(file_hashes(place, ["**/*"])) if place.is_dir() else ""
