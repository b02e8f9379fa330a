"""Code of users that a run names by its import path: an engine's factory, a model's factory."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from bench.launch.rank_entry.mfsdp_bench_rank import file_hashes
from bench.resolve.import_path import NamedCode, locate
from bench.spec import ResolvedRun, find_engine

_OURS = frozenset({"bench", "mfsdp_core"})


def import_paths(resolved: ResolvedRun) -> tuple[str, ...]:
    """What `resolved` names, in a form that says where to look."""
    row = find_engine(resolved.engine.name)
    engine = () if row is None else (row.factory,)
    return engine if resolved.factory is None else (*engine, resolved.factory)


def named_code(resolved: ResolvedRun) -> tuple[NamedCode, ...]:
    """The packages of users that a rank of `resolved` loads, each once; what is missing is not."""
    found = {}
    for path in import_paths(resolved):
        code = locate(path) if path.partition(".")[0] not in _OURS else None
        if code is not None:
            found[code.package] = code
    return tuple(found.values())


def named_folders(resolved: ResolvedRun) -> tuple[str, ...]:
    """What a rank needs on its path to find that code; installed packages it finds by itself."""
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    folders = (str(code.root) for code in named_code(resolved))
    return tuple(folder for folder in folders if folder not in installed)


def named_files(resolved: ResolvedRun) -> dict[str, str]:
    """Path below its root -> SHA-256, of all files of that code."""
    return {
        file: content
        for code in named_code(resolved)
        for file, content in file_hashes(code.root, list(code.patterns)).items()
    }
