"""The code that the ranks of a run import, and its identity: a finished cell counts only for that.

Without arms it is the checkout and the interpreter of this process, as they are when a run starts.
An arm has its own, looked at once before anything is started (`Pinned`): whatever differs later is
refused by the ranks (`code_proof`). An engine or a model that is named by its import path is code
of users, and counts as well.

The identity is one hash over the content of the files that run in a rank, committed or not, and the
versions of torch and Python. For `mfsdp` that is mfsdp_core too; for every engine, the modules of
the other engines are left out, so that a change of the core runs only the mfsdp cells again. An
arm's hash also covers the packages that were installed, or checked out, for it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import bench
from bench.launch.rank_entry.mfsdp_bench_rank import combined, file_hashes
from bench.resolve.import_path import NamedCode, locate
from bench.spec import ResolvedRun, find_engine, known_engine
from bench.spec.engine_table import TABLE

_HEX_DIGITS = 16
_OURS = frozenset({"bench", "mfsdp_core"})
# What bench.worker loads and what shapes its numbers; store, launch and derive only keep them.
RANK_PATTERNS = (
    "bench/worker/**/*.py",
    "bench/loop.py",
    "bench/spec.py",  # of older commits, which arms may be
    "bench/spec/**/*.py",
    "bench/models/**/*.py",
    "bench/data/**/*.py",
    "bench/engines/**/*.py",
    "bench/meters/**/*.py",
    "bench/derive/__init__.py",
    "bench/derive/counts.py",
    "bench/derive/exposed.py",
    "bench/derive/live_storage.py",
    "bench/derive/timeline.py",  # finds the peak of the recorded step
)
CORE_PATTERNS = tuple(one for one in known_engine("mfsdp").code if "mfsdp_core/" in one)


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
class Pinned:
    """What an arm was when it was prepared.

    files: path -> SHA-256 of all code that ranks may run, below the checkout. packages: package of
    another repository -> folder that holds it and hash. distributions: installed for the arm, name
    -> version and folder. versions: of the packages that env.json names. torch_engines: engine ->
    hash of its own files in torch.
    """

    files: Mapping[str, str]
    torch: str
    python: str
    torch_engines: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    distributions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCode:
    """Where ranks find their code.

    root: checkout whose `bench` runs in the ranks. python: interpreter. paths: put before `root`
    on the path of the ranks. unknown_settings: settings that this `bench` does not know, all at
    their defaults; they are left out of its spec.json.
    """

    root: Path
    python: str
    arm: str | None = None
    paths: tuple[Path, ...] = ()
    pinned: Pinned | None = None
    unknown_settings: frozenset[tuple[str, ...]] = frozenset()

    def file_hashes(self, engine: str) -> dict[str, str]:
        """Path -> SHA-256 of the files that a run of `engine` measures."""
        patterns = measured_patterns(engine)
        if self.pinned is None:
            return file_hashes(self.root, list(patterns))
        left_out = tuple(one[1:] for one in patterns if one[0] == "!")
        starts = tuple(one.partition("*")[0] for one in patterns if one[0] != "!")
        return {
            file: content
            for file, content in self.pinned.files.items()
            if file.startswith(starts) and not file.startswith(left_out)
        }

    def versions(self) -> tuple[str, str]:
        """Versions of torch and Python in the ranks."""
        if self.pinned is not None:
            return self.pinned.torch, self.pinned.python
        return installed_version("torch") or "none", platform.python_version()


@cache
def own_code() -> RankCode:
    """The checkout and interpreter of this process."""
    return RankCode(checkout_root(), sys.executable)


def measured_patterns(engine: str) -> tuple[str, ...]:
    """Files that a run of `engine` measures, as patterns below a checkout; `!` takes out.

    An engine from elsewhere may build on any of ours.
    """
    row = find_engine(engine)
    if row not in TABLE:
        return (*RANK_PATTERNS, *CORE_PATTERNS)
    own = {one for other in TABLE if other is not row for one in other.code}
    others = tuple(f"!{one}" for one in sorted(own - {*row.code}) if one.startswith("bench/"))
    return (*RANK_PATTERNS, *others, *(one for one in row.code if not one.startswith("bench/")))


def torch_patterns(engine: str) -> tuple[str, ...]:
    """Files of torch that are the engine itself, as patterns below the folder that holds torch.

    They are recorded with every run, and compared where an arm is pinned.
    """
    row = find_engine(engine)
    return ("torch/version.py", *(row.torch_code if row is not None else ()))


def named_code(resolved: ResolvedRun) -> tuple[NamedCode, ...]:
    """The users' packages that a rank of `resolved` loads, without those that are missing."""
    row, found = find_engine(resolved.engine.name), {}
    for path in filter(None, (None if row is None else row.factory, resolved.factory)):
        code = locate(path) if path.partition(".")[0] not in _OURS else None
        if code is not None:
            found[code.package] = code
    return tuple(found.values())


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
    digest = hashlib.sha256()
    torch, python = code.versions()
    for version in (f"torch {torch}", f"python {python}"):
        digest.update(version.encode() + b"\0")
    for file, content in sorted(code.file_hashes(resolved.engine.name).items()):
        digest.update(f"{file}\0{content}\0".encode())
    named = {
        file: content
        for one in named_code(resolved)
        for file, content in file_hashes(one.root, list(one.patterns)).items()
    }
    for file, content in sorted(named.items()):
        digest.update(f"named {file}\0{content}\0".encode())
    for line in _added(code, resolved.engine.name):
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()[:_HEX_DIGITS]


def _added(code: RankCode, engine: str) -> list[str]:
    """What an arm has besides a checkout; no path: the same code hashes the same anywhere."""
    pinned = code.pinned
    if pinned is None or not (pinned.packages or pinned.distributions):
        return []
    return [
        f"torch engine {pinned.torch_engines.get(engine)}",
        json.dumps({name: found["sha256"] for name, found in sorted(pinned.packages.items())}),
        json.dumps({name: item["version"] for name, item in sorted(pinned.distributions.items())}),
    ]


def expected_code(resolved: ResolvedRun, code: RankCode, imports: Iterable[str]) -> dict[str, Any]:
    """The document by which a rank judges itself (see `rank_entry/mfsdp_bench_rank.py`).

    Args:
        resolved: the run.
        code: what its ranks should import.
        imports: modules that a rank loads before it looks.
    """
    engine = resolved.engine.name
    files = code.file_hashes(engine)
    own = dict.fromkeys(one.lstrip("!").partition("/")[0] for one in measured_patterns(engine))
    packages = {name: _own_package(name, engine, files, code.root) for name in own}
    # An arm may bring its own copy of a user's package, so its place is not prescribed there.
    for named in named_code(resolved):
        wanted: dict[str, Any] = {"patterns": list(named.patterns)}
        if code.pinned is None:
            own_files = file_hashes(named.root, list(named.patterns))
            wanted |= {"root": str(named.root), "sha256": combined(own_files), "files": own_files}
        packages[named.package] = wanted
    document: dict[str, Any] = {"arm": code.arm, "import": list(imports), "distributions": {}}
    stock: dict[str, Any] = {"patterns": list(torch_patterns(engine))}
    if code.pinned is not None:
        stock["sha256"] = code.pinned.torch_engines.get(engine)
        packages |= {name: dict(wanted) for name, wanted in code.pinned.packages.items()}
        document["distributions"] = {k: dict(v) for k, v in code.pinned.distributions.items()}
        document |= {"torch": code.pinned.torch, "python": code.pinned.python}
    return document | {"packages": {**packages, "torch": stock}}


def _own_package(name: str, engine: str, files: Mapping[str, str], root: Path) -> dict[str, Any]:
    patterns = [one for one in measured_patterns(engine) if one.lstrip("!").startswith(f"{name}/")]
    own = {file: content for file, content in files.items() if file.startswith(f"{name}/")}
    return {"patterns": patterns, "root": str(root), "sha256": combined(own), "files": own}
