"""Code that a user names by its import path, `package.module:name`: found without running it.

Looked for where a rank will find it: in the current folder, then on the path of this interpreter.
"""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from bench.errors import UsageError


@dataclass(frozen=True)
class NamedCode:
    """The package that an import path starts with.

    root: the folder that holds it, which a rank needs on its path. patterns: its files below root.
    file: of the module that is named.
    """

    package: str
    root: Path
    patterns: tuple[str, ...]
    file: Path


def locate(import_path: str) -> NamedCode | None:
    """Where the module of `import_path` is; None if it is nowhere."""
    return _locate(import_path.partition(":")[0], (str(Path.cwd()), *sys.path))


@cache
def _locate(module: str, where: tuple[str, ...]) -> NamedCode | None:
    top, *rest = module.split(".")
    first = _find(top, list(where))
    spec = first
    name = top
    for part in rest:
        name = f"{name}.{part}"
        inside = None if spec is None else spec.submodule_search_locations
        spec = None if inside is None else _find(name, list(inside))
    if first is None or spec is None or spec.origin is None or first.origin is None:
        return None
    start = Path(first.origin).resolve()
    is_package = first.submodule_search_locations is not None
    root = start.parent.parent if is_package else start.parent
    patterns = (f"{top}/**/*.py",) if is_package else (start.name,)
    return NamedCode(top, root, patterns, Path(spec.origin).resolve())


def _find(name: str, where: list[str]) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(name, where)
    except (ImportError, ValueError, OSError):
        return None


def problem_of(import_path: str) -> str | None:
    """Why `import_path` cannot be used here: no such module, no such name in it; None if it can."""
    module, _, name = import_path.partition(":")
    code = locate(import_path)
    if code is None:
        return (
            f"no module {module} in {Path.cwd()} or on the path of {sys.executable}: correct the"
            " name, start from the folder that holds it, or install its package"
        )
    names = top_level_names(code.file)
    if names is None or name in names:
        return None
    known = ", ".join(sorted(name for name in names if not name.startswith("_"))[:8]) or "nothing"
    return f"{code.file} defines no {name}: it has {known}"


def load(import_path: str) -> Any:
    """What `import_path` names, imported from where `locate` finds it.

    Raises:
        UsageError: it cannot be imported, or has no such name.
    """
    module, _, name = import_path.partition(":")
    code = locate(import_path)
    if code is not None and str(code.root) not in sys.path:
        sys.path.insert(0, str(code.root))
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's code, which may do anything
        raise UsageError(f"{import_path} cannot be loaded: {error!r}") from error


@cache
def top_level_names(file: Path) -> set[str] | None:
    """Names that a module defines or imports; None where only running it could tell."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return None if "*" in names or "__getattr__" in names else names
