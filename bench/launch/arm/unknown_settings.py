"""Settings and engines that the `bench` of an older commit does not know.

spec.json is what two versions agree on. A setting that came later can be left out of it as long as
it has its default, which is how the older code behaves; with any other value the older code cannot
run the cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bench.errors import UsageError
from bench.spec import ResolvedRun, known_engine
from bench.spec.engine_table import TABLE

SettingPath = tuple[str, ...]


def unknown_settings(
    unreadable: Mapping[str, Sequence[Sequence[Any]]], cells: Mapping[str, ResolvedRun], who: str
) -> frozenset[SettingPath]:
    """The settings to leave out of spec.json for an arm.

    Args:
        unreadable: cell -> what the arm's `bench` says about its spec, as (place, kind, message).
        cells: the specs.
        who: begins the message of an error.

    Raises:
        UsageError: the arm cannot run a cell as it is meant.
    """
    unknown: set[SettingPath] = set()
    for cell, problems in unreadable.items():
        for place, kind, message in problems:
            path = tuple(str(part) for part in place)
            if kind != "extra_forbidden" or not _is_default(cells[cell], path):
                value = _shown(cells[cell], path)
                raise UsageError(
                    f"{who}: its bench cannot run cell {cell}: {'.'.join(path)}{value}: {message};"
                    " choose a later commit, or leave the cell out with --skip"
                )
            unknown.add(path)
    return frozenset(unknown)


def check_engines(root: Path, cells: Mapping[str, ResolvedRun], who: str) -> None:
    """Refuse a checkout without the engine of a cell, whose settings it takes for somebody's own.

    Args:
        root: the arm's checkout.
        cells: the specs.
        who: begins the message of an error.

    Raises:
        UsageError: engines of this repository that came later.
    """
    for cell, resolved in cells.items():
        row = known_engine(resolved.engine.name)
        module = row.factory.partition(":")[0].replace(".", "/")
        if row in TABLE and not (root / f"{module}.py").is_file():
            raise UsageError(
                f"{who}: its bench has no engine {row.name}, which cell {cell} needs; choose a"
                " later commit, or leave the cell out with --skip"
            )


def _is_default(resolved: ResolvedRun, path: SettingPath) -> bool:
    owner = _owner(resolved, path)
    if not isinstance(owner, BaseModel) or path[-1] not in type(owner).model_fields:
        return False
    field = type(owner).model_fields[path[-1]]
    default = field.get_default(call_default_factory=True)
    return not field.is_required() and bool(default == getattr(owner, path[-1]))


def _owner(resolved: ResolvedRun, path: SettingPath) -> Any:
    """What holds the last part of `path`; an engine's own settings are written beside the others.

    Raises:
        AttributeError: nothing does.
    """
    owner: Any = reduce(getattr, path[:-1], resolved)
    return owner.settings if hasattr(getattr(owner, "settings", None), path[-1]) else owner


def _shown(resolved: ResolvedRun, path: SettingPath) -> str:
    try:
        return f" = {getattr(_owner(resolved, path), path[-1])!r}"[:80]
    except AttributeError:
        return ""
