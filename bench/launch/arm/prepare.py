"""From what is wanted of arms to the code that their ranks will run, or one clear refusal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.launch.arm.packages import distributions_in, installed_packages
from bench.launch.arm.probe import check_engines, probe, unknown_settings
from bench.launch.code import (
    CORE_PATTERNS,
    RANK_PATTERNS,
    Pinned,
    RankCode,
    checkout_root,
)
from bench.launch.git import commit_of, git_state, worktree
from bench.launch.rank_entry.mfsdp_bench_rank import file_hashes
from bench.spec import ResolvedRun, engine_names
from bench.store.atomic import reporting_failed_writes
from bench.store.file_lock import FileLock, holder_of


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
        parts = []
        if self.git is not None:
            parts.append(f"git {self.git}" + (f" of {self.repo.name}" if self.repo else ""))
        elif self.checkout is not None:
            parts.append(f"checkout {self.checkout.name}")
        else:
            parts.append("working tree")
        if self.python is not None:
            parts.append("its own interpreter")
        parts += [Path(pin).name for pin in self.packages]
        parts += [f"{path}={value}" for path, value in self.settings.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class PreparedArm:
    """An arm that can run: its code, and what the plan says about it (no path in it)."""

    name: str
    description: str
    code: RankCode
    commit: str | None
    dirty_hash: str | None


@dataclass(frozen=True)
class _Source:
    """Where the code of an arm is. `packages`: of another repository, below `paths`."""

    root: Path
    folder: Path
    paths: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()


def prepare_arms(
    requests: Sequence[ArmRequest], cells: Mapping[str, Mapping[str, ResolvedRun]], cache: Path
) -> tuple[PreparedArm, ...]:
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


def _prepare(request: ArmRequest, cells: Mapping[str, ResolvedRun], cache: Path) -> PreparedArm:
    who = f"arm {request.name}"
    named = shutil.which(request.python) if request.python else None
    # Not resolved: the link in a virtual environment is what makes it one.
    python = str(Path(named).absolute()) if named else sys.executable
    source = _source(request, cache, who)
    paths = source.paths
    installed: dict[str, dict[str, Any]] = {}
    if request.packages:
        target = installed_packages(request.packages, python, cache, who)
        paths = (target, *paths)
        folder = str(target.resolve())
        for name, version in distributions_in(target).items():
            installed[name] = {"version": version, "folder": folder}
    check_engines(source.root, cells, who)
    code = RankCode(source.root, python, request.name, paths)
    answer = probe(code, cells=cells, packages=source.packages, distributions=installed)
    unknown = unknown_settings(answer["unreadable"], cells, who)
    state = git_state(source.folder)
    return PreparedArm(
        name=request.name,
        description=request.described(),
        code=replace(
            code, pinned=_pinned(code, source, answer, installed), unknown_settings=unknown
        ),
        commit=state["commit"],
        dirty_hash=state["dirty_hash"],
    )


def _source(request: ArmRequest, cache: Path, who: str) -> _Source:
    """The folder of an arm, and whether the ranks run its `bench` or only import from it."""
    folder = request.checkout or checkout_root()
    if request.git is not None:
        repository = request.repo or checkout_root()
        folder = worktree(repository, commit_of(repository, request.git, who), cache, who)
    folder = folder.resolve()
    if (folder / "bench" / "launch" / "agent.py").is_file():
        return _Source(folder, folder)
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
    return _Source(checkout_root(), folder, (place,), packages)


def _pinned(
    code: RankCode,
    source: _Source,
    answer: Mapping[str, Any],
    installed: Mapping[str, Mapping[str, Any]],
) -> Pinned:
    """What the ranks will be held to.

    Raises:
        UsageError: the interpreter would import something from elsewhere.
    """
    found = answer["packages"]
    roots = dict.fromkeys(("bench", "mfsdp_core"), code.root)
    roots |= dict.fromkeys(source.packages, source.paths[-1] if source.paths else code.root)
    for name, root in roots.items():
        if found[name]["root"] != str(root):
            raise UsageError(
                f"arm {code.arm}: {code.python} would import {name} from {found[name]['root']},"
                f" expected {root}; remove what puts the other one first"
            )
    return Pinned(
        files=file_hashes(code.root, [*RANK_PATTERNS, *CORE_PATTERNS]),
        torch=answer["torch"],
        python=answer["python"],
        torch_engines={engine: found[f"torch@{engine}"]["sha256"] for engine in engine_names()},
        packages={
            name: {
                "patterns": [f"{name}/**/*.py"],
                "root": str(roots[name]),
                "sha256": found[name]["sha256"],
            }
            for name in source.packages
        },
        distributions=installed,
        versions=answer["versions"],
    )
