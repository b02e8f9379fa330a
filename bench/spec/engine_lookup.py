"""Engines by name: a row of the table, an entry point of another package, or an import path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata

from bench.errors import ConfigError
from bench.spec.engine_row import EngineRow, EngineSettings
from bench.spec.engine_table import TABLE, MfsdpSettings

GROUP = "mfsdp_bench.engines"
IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
IMPORT_PATH_FORM = "package.module:factory"


class SwitchesOfAnyEngine(MfsdpSettings):
    """What an engine given by its import path may read: the switches of mfsdp, all of them.

    It refuses (`UnsupportedError`) what it does not support.
    """


def is_import_path(name: str) -> bool:
    """Whether `name` has the form of `IMPORT_PATH_FORM`."""
    return re.fullmatch(IMPORT_PATH, name) is not None


def find_engine(name: str) -> EngineRow | None:
    """The row of an engine; None if no engine has this name.

    Raises:
        ConfigError: a package offers the name, but its entry point is not a row.
    """
    for row in TABLE:
        if row.name == name:
            return row
    if is_import_path(name):
        return EngineRow(name, name, settings=SwitchesOfAnyEngine, outer_axis=True)
    return _offered(name)


def known_engine(name: str) -> EngineRow:
    """The row of an engine.

    Raises:
        ConfigError: no engine has this name.
    """
    row = find_engine(name)
    if row is None:
        raise ConfigError(
            f"engine.name: expected one of {', '.join(engine_names())}, or {IMPORT_PATH_FORM} of an"
            f" engine of your own; found {name!r}"
        )
    return row


def engine_names() -> tuple[str, ...]:
    """Names of the table, then those that installed packages offer."""
    return tuple(dict.fromkeys((*(row.name for row in TABLE), *_entry_points())))


@cache
def engine_rows() -> tuple[EngineRow, ...]:
    """The rows of `engine_names`, without those of packages that cannot be loaded."""
    return tuple(_loadable_rows())


def forget_entry_points() -> None:
    """Read the installed packages again, after one was added or removed."""
    for known in (engine_rows, own_settings, _entry_points, _offered):
        known.cache_clear()


def _loadable_rows() -> Iterator[EngineRow]:
    for name in engine_names():
        try:
            row = find_engine(name)
        except ConfigError:
            continue
        if row is not None:
            yield row


@cache
def own_settings() -> Mapping[str, tuple[type[EngineSettings], ...]]:
    """Setting -> the models of the engines that have one of this name."""
    found: dict[str, tuple[type[EngineSettings], ...]] = {}
    for row in engine_rows():
        for setting in row.settings.model_fields:
            found[setting] = (*found.get(setting, ()), row.settings)
    return found


@cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


@cache
def _offered(name: str) -> EngineRow | None:
    point = _entry_points().get(name)
    if point is None:
        return None
    who = f"engine.name: {name} is offered by the entry point {point.value!r} of {GROUP}"
    try:
        row = point.load()
    except Exception as error:
        raise ConfigError(
            f"{who}, which cannot be loaded ({type(error).__name__}: {error}): mend or remove that"
            " package"
        ) from error
    if not isinstance(row, EngineRow) or row.name != name:
        found = f"the row of {row.name!r}" if isinstance(row, EngineRow) else f"{row!r:.60}"
        raise ConfigError(f"{who}; expected an EngineRow named {name!r}, found {found}")
    return row
