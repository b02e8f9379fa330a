"""The code that the ranks of a run import, and its identity: a finished cell counts only for that.

Without arms it is the checkout and the interpreter of this process, as they are when a run starts.
An arm has its own, looked at once before anything is started (`CodeIdentity`): whatever differs
later is refused by the ranks (`code_proof`). An engine or a model that is named by its import path
is code of users, and counts as well.

What names a run is one hash over the content of the files that run in a rank, committed or not,
and the versions of torch and Python. The modules of other engines than the run's are left out, so
that a change of the core runs only the mfsdp cells again. An arm's hash also covers the packages
that were installed, or checked out, for it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import bench
from bench.launch.rank_entry.mfsdp_bench_rank import file_hashes
from bench.resolve.import_path import NamedCode, locate
from bench.spec import ResolvedRun, find_engine
from bench.spec.engine_table import TABLE

OWN_PACKAGES: Final = ("bench", "mfsdp_core")
#: What bench.worker loads and what shapes its numbers; store, launch and derive only keep them.
RANK_PATTERNS: Final = (
    *(
        f"bench/{room}/**/*.py"
        for room in ("worker", "spec", "models", "data", "engines", "meters")
    ),
    "bench/loop.py",
    # timeline finds the peak of the recorded step.
    *(f"bench/derive/{name}.py" for name in ("__init__", "counts", "exposed", "live_storage")),
    "bench/derive/timeline.py",
    "mfsdp_core/**/*.py",
)


def checkout_root() -> Path:
    """The folder that holds the packages this process runs from."""
    return Path(bench.__file__).resolve().parent.parent


def installed_version(package: str) -> str | None:
    """Version of a package of this interpreter by its metadata, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class CodeIdentity:
    """What an arm was when it was prepared.

    files: path -> SHA-256 of all code that ranks may run, below the checkout. commit, dirty_hash:
    of the arm's checkout; None where git cannot say, or nothing was changed. packages: package of
    another repository -> folder that holds it and files. distributions: installed for the arm, name
    -> version and folder. versions: of the packages that env.json names.
    """

    files: Mapping[str, str]
    torch: str
    python: str
    commit: str | None = None
    dirty_hash: str | None = None
    packages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    distributions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def added(self) -> list[object]:
        """What it has besides a checkout; no path: the same code hashes the same anywhere."""
        versions = [(name, facts["version"]) for name, facts in sorted(self.distributions.items())]
        return [[sorted(package["files"].items()) for package in self.packages.values()], versions]


@dataclass(frozen=True)
class RankCode:
    """Where ranks find their code.

    root: checkout whose `bench` runs in the ranks. python: interpreter. paths: put before `root`
    on the path of the ranks. pinned: what an arm was. unknown_settings: settings that this `bench`
    does not know, all at their defaults; they are left out of its spec.json.
    """

    root: Path
    python: str
    arm: str | None = None
    paths: tuple[Path, ...] = ()
    pinned: CodeIdentity | None = None
    unknown_settings: frozenset[tuple[str, ...]] = frozenset()

    def files(self) -> Mapping[str, str]:
        """Path -> SHA-256 of all that ranks may run of the checkout."""
        return file_hashes(self.root, RANK_PATTERNS) if self.pinned is None else self.pinned.files

    def file_hashes(self, engine: str) -> dict[str, str]:
        """Of them those that a run of `engine` measures; one from elsewhere may build on any."""
        row = find_engine(engine)
        own = (
            {pattern for other in TABLE for pattern in other.code}
            if row not in TABLE
            else {*row.code}
        )
        others = {pattern for other in TABLE for pattern in other.code} - own
        left_out = tuple(pattern.partition("*")[0] for pattern in others)
        return {file: h for file, h in self.files().items() if not file.startswith(left_out)}

    def versions(self) -> tuple[str, str]:
        """Versions of torch and Python in the ranks."""
        if self.pinned is not None:
            return self.pinned.torch, self.pinned.python
        return installed_version("torch") or "none", platform.python_version()


@cache
def own_code() -> RankCode:
    """The checkout and interpreter of this process."""
    return RankCode(checkout_root(), sys.executable)


def named_code(resolved: ResolvedRun) -> tuple[NamedCode, ...]:
    """The users' packages that a rank of `resolved` loads, without those that are missing."""
    row, codes = find_engine(resolved.engine.name), {}
    for path in filter(None, (None if row is None else row.factory, resolved.factory)):
        code = locate(path) if path.partition(".")[0] not in OWN_PACKAGES else None
        if code is not None:
            codes[code.package] = code
    return tuple(codes.values())


def named_folders(resolved: ResolvedRun) -> tuple[str, ...]:
    """What a rank needs on its path to find that code; installed packages it finds by itself."""
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    folders = (str(code.root) for code in named_code(resolved))
    return tuple(folder for folder in folders if folder not in installed)


def code_identity(resolved: ResolvedRun, code: RankCode | None = None) -> str:
    """16 hex digits that change when the code measured by `resolved` changes.

    Args:
        resolved: decides which engine's code counts.
        code: of an arm; None is the code of this process.
    """
    code = code or own_code()
    facts: list[object] = [
        code.versions(),
        sorted(code.file_hashes(resolved.engine.name).items()),
        [sorted(file_hashes(own.root, own.patterns).items()) for own in named_code(resolved)],
        [[], []] if code.pinned is None else code.pinned.added(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
