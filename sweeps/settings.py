"""Dotted settings of a run: `engine.name`, `train.lr`, `env.NCCL_DEBUG`, one value each.

Everything a sweep file says about a run (base, axes, overrides, `--set`) is brought into this one
form, checked value by value, so that each value keeps the line it was written on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from bench.errors import ConfigError, UsageError
from bench.redaction import REDACTED, looks_secret, redact_text
from bench.spec import SHARED_SETTINGS, RunSpec, own_settings
from sweeps.suggest import did_you_mean

Scalar = str | int | float | bool | None
Settings = Mapping[str, Scalar]

ENGINE_PREFIX = "engine."
ENV_PREFIX = "launch.env."
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class SettingError(UsageError):
    """A path that no run has, or a value that it does not take. The caller adds the line."""


@cache
def known_paths() -> tuple[str, ...]:
    """Every dotted path of a RunSpec, with the own settings of all engines.

    Environment variables are `env.NAME` and not listed.
    """
    paths = (path for path in _leaves(RunSpec, "") if not path.startswith(ENGINE_PREFIX))
    engines = (f"{ENGINE_PREFIX}{name}" for name in (*SHARED_SETTINGS, *own_settings()))
    return (*paths, *engines)


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        elif f"{prefix}{name}." != ENV_PREFIX:
            yield f"{prefix}{name}"


def full_path(path: str) -> str:
    """`path` with `env.NAME` written out as `launch.env.NAME`.

    Raises:
        SettingError: no run has this path.
    """
    full = f"launch.{path}" if path.startswith("env.") else path
    if full.startswith(ENV_PREFIX):
        name = full.removeprefix(ENV_PREFIX)
        if not _ENV_NAME.match(name):
            raise SettingError(f"{name!r} is not the name of an environment variable")
        return full
    if full in known_paths():
        return full
    if full in RunSpec.model_fields:
        raise SettingError(f"{path!r} is a section, expected a value in it such as '{_in(full)}'")
    _, _, leaf = full.rpartition(".")
    if leaf != full and (section := difflib.get_close_matches(leaf, RunSpec.model_fields, 1, 0.8)):
        hint = f"; {section[0]!r} is a section of its own, as in '{_in(section[0])}'"
    else:
        hint = did_you_mean(path, [*known_paths(), "env.NCCL_DEBUG"])
    raise SettingError(f"unknown setting {path!r}{hint}")


def _in(section: str) -> str:
    return next(path for path in (*known_paths(), "launch.env.NAME") if path.startswith(section))


def short_path(path: str) -> str:
    """The form that is printed: `launch.env.NAME` as `env.NAME`."""
    return path.removeprefix("launch.") if path.startswith(ENV_PREFIX) else path


def checked(path: str, value: object) -> Scalar:
    """`value` as the setting `path` takes it (`path` in full form).

    Numbers become text for environment variables, where None means "not set".

    Raises:
        SettingError: the value has the wrong type or is out of range.
    """
    shown = short_path(path)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise SettingError(f"{shown}: expected a single value, found a {type(value).__name__}")
    if path.startswith(ENV_PREFIX):
        return _environment_value(shown, value)
    try:
        RunSpec.model_validate(nested({path: value}), strict=True)
    except ValidationError as error:
        raise SettingError(f"{shown}: {explain(error.errors()[0])}") from None
    except ConfigError as error:
        raise SettingError(str(error)) from None
    return value


def _environment_value(shown: str, value: Scalar) -> Scalar:
    if isinstance(value, bool):
        raise SettingError(f"{shown}: quote the value; 'true' and '1' are different texts")
    if isinstance(value, str) and "\0" in value:
        raise SettingError(f"{shown}: an environment variable holds no NUL character")
    return value if value is None else str(value)


def explain(error: Any) -> str:
    """One pydantic error as expected and found, with a suggestion among fixed choices."""
    given = error["input"]
    shown = f"found {given!r}"[:80]
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        hint = did_you_mean(given, choices) if isinstance(given, str) else ""
        return f"expected one of {', '.join(choices)}, {shown}{hint}"
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if message.startswith(("greater", "less")):
        message = f"a value {message}"
    elif error["type"] == "dict_type":
        message = "a mapping"
    elif error["type"] == "too_short":
        message = "at least one"
    return f"expected {message}, {shown}"


def nested(settings: Settings) -> dict[str, Any]:
    """Settings as the nested mapping that RunSpec validates; unset environment variables vanish."""
    document: dict[str, Any] = {}
    for path, value in settings.items():
        if path.startswith(ENV_PREFIX):
            keys = ["launch", "env", path.removeprefix(ENV_PREFIX)]
        else:
            keys = path.split(".")
        section = document
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        if value is None and path.startswith(ENV_PREFIX):
            continue
        section[keys[-1]] = value
    return document


def flattened(
    tree: Mapping[str, Any], path: tuple[str | int, ...] = (), prefix: str = ""
) -> Iterator[tuple[str, Any, tuple[str | int, ...]]]:
    """Dotted path, value and keys of everything in nested or dotted settings below `path`."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, (*path, key), f"{dotted}.")
        elif value is None and (dotted in RunSpec.model_fields or dotted == "launch.env"):
            continue  # `train:` with nothing below it
        else:
            yield dotted, value, (*path, key)


def run_spec(settings: Settings) -> RunSpec:
    """The RunSpec that these settings, each already `checked`, describe."""
    return RunSpec.model_validate(nested(settings), strict=True)


def shown_value(value: Scalar) -> str:
    """The text of a value in labels, ids and expressions: `true`, `null`, `8`, `mfsdp`.

    Without credentials: it stands in names of cells, and so in plans, reports and messages.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else redact_text(str(value))


def shown_setting(path: str, value: Scalar) -> str:
    """As `shown_value`, and nothing of the value of a variable whose name is that of a secret."""
    secret = full_path(path).startswith(ENV_PREFIX) and looks_secret(path)
    return REDACTED if secret and value is not None else shown_value(value)


def spec_value(spec: RunSpec, path: str) -> str:
    """The text of the value that `spec` holds at `path` (full form)."""
    if path.startswith(ENV_PREFIX):
        return shown_setting(path, spec.launch.env.get(path.removeprefix(ENV_PREFIX)))
    if path.startswith(ENGINE_PREFIX):
        return shown_value(spec.engine.asked(path.removeprefix(ENGINE_PREFIX)))
    value: Any = spec
    for key in path.split("."):
        value = getattr(value, key)
    return shown_value(value)
