"""The code that the ranks of a run import: whose checkout, which interpreter, which packages.

Without arms that is the checkout and the interpreter of this process, as they are when a run
starts. An arm has its own, looked at once before anything is started (`pinned`): whatever differs
later is refused by the ranks.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import bench
from bench.launch.named_code import named_code
from bench.launch.rank_entry.mfsdp_bench_rank import combined, file_hashes
from bench.spec import ResolvedRun, find_engine, known_engine
from bench.spec.engine_table import TABLE

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


def installed_version(package: str) -> str:
    """Version of a package of this interpreter, `none` without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


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
        return installed_version("torch"), platform.python_version()


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
    others = tuple(f"!{one}" for one in sorted(own) if one.startswith("bench/"))
    return (*RANK_PATTERNS, *others, *(one for one in row.code if not one.startswith("bench/")))


def torch_patterns(engine: str) -> tuple[str, ...]:
    """Files of torch that are the engine itself, as patterns below the folder that holds torch.

    They are recorded with every run, and compared where an arm is pinned.
    """
    row = find_engine(engine)
    return ("torch/version.py", *(row.torch_code if row is not None else ()))


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
