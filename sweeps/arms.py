"""Arms as written: `--arm NAME=WHAT` and `arms:` of a sweep file.

WHAT is `.` (the working tree this command runs from), a git ref, or KEY:VALUE pairs with commas
between them:
    git:REF  repo:PATH      a ref, of this repository or of another one
    checkout:PATH           a folder, unchanged
    python:INTERPRETER      for agent and ranks
    packages:PIN            installed by pip for this arm alone; may be repeated
    set:PATH=VALUE          a setting of this arm's runs; may be repeated
An arm of settings alone runs the working tree: two engines are two such arms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import UsageError
from bench.launch.arms import ArmRequest
from sweeps.schema import ArmSection
from sweeps.selection import parse_assignments
from sweeps.settings import SettingError, Settings, checked, explain, flattened, full_path
from sweeps.suggest import did_you_mean

WORKING_TREE = "."
MAX_ARMS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,23}\Z")
_PAIR = re.compile(r"([a-z]+):(.*)\Z", re.DOTALL)


class ArmError(UsageError):
    """An arm that cannot be meant. The caller adds the line."""


def parse_arm_options(texts: Iterable[str]) -> tuple[ArmRequest, ...]:
    """The arms of `--arm NAME=WHAT`; paths are relative to the current folder.

    Raises:
        UsageError: a malformed or repeated arm, or only one.
    """
    arms = []
    for text in texts:
        name, separator, what = text.partition("=")
        if not separator or not what.strip():
            raise UsageError(
                f"--arm {text}: expected NAME=WHAT, as in --arm base=main --arm head=."
            )
        try:
            arms.append(read_arm(name.strip(), what.strip(), Path()))
        except ArmError as error:
            raise UsageError(f"--arm {text}: {error}") from None
    problem = set_problem([arm.name for arm in arms])
    if problem:
        raise UsageError(f"--arm: {problem}")
    return tuple(arms)


def read_arm(name: str, written: object, folder: Path) -> ArmRequest:
    """One arm, as a text or as the mapping of a sweep file.

    Args:
        name: of the arm.
        written: WHAT, or its keys and values (`packages` then is a list, `set` a mapping).
        folder: what relative paths are relative to.

    Raises:
        ArmError: a name or a value that cannot be meant.
    """
    if not _NAME.match(name):
        raise ArmError(f"expected a name of up to 24 letters, digits and ._-, found {name!r}")
    if not isinstance(written, str | Mapping):
        known = ", ".join(ArmSection.model_fields)
        raise ArmError(f"expected a git ref, `.` or a mapping of {known}")
    values = _pairs(written) if isinstance(written, str) else dict(written)
    for key, value in values.items():
        if value is None:
            raise ArmError(f"{key}: expected a value, found none; leave the key out")
    try:
        section = ArmSection.model_validate(values)
    except ValidationError as error:
        raise ArmError(_problem(error.errors()[0])) from None
    if section.git is not None and section.checkout is not None:
        raise ArmError("git and checkout exclude each other; keep one of them")
    if section.repo is not None and section.git is None:
        raise ArmError("repo says where a git ref is looked up, so it needs git:REF as well")
    return ArmRequest(
        name=name,
        git=section.git,
        repo=_path(section.repo, folder),
        checkout=None if section.checkout == WORKING_TREE else _path(section.checkout, folder),
        python=_program(section.python, folder),
        packages=tuple(_pin(pin, folder) for pin in section.packages or ()),
        settings=_settings(section.set or {}),
    )


def _problem(error: Any) -> str:
    """One refusal of `ArmSection`, as expected and found."""
    key, *_ = error["loc"]
    if error["type"] == "extra_forbidden":
        known = tuple(ArmSection.model_fields)
        return f"unknown key {key!r}{did_you_mean(key, known) or '; expected ' + ', '.join(known)}"
    return f"{key}: {explain(error)}"


def set_problem(names: Sequence[str]) -> str | None:
    """What is wrong with these names as the arms of one sweep; None if nothing is."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"arm {twice[0]!r} is given twice; give each arm a name of its own"
    if len(names) == 1:
        return (
            f"{names[0]!r} is the only arm; a comparison needs two, as in base=main and head=. (the"
            " working tree)"
        )
    if len(names) > MAX_ARMS:
        return f"{len(names)} arms; expected at most {MAX_ARMS}"
    return None


def _pairs(text: str) -> dict[str, Any]:
    """A part without a key belongs to the value before it, where that may hold commas."""
    if text == WORKING_TREE:
        return {}
    if _PAIR.match(text) is None:
        return {"git": text}
    values: dict[str, Any] = {}
    key = ""
    for part in map(str.strip, text.split(",")):
        pair = _PAIR.match(part)
        key, value = (key, part) if pair is None else pair.groups()
        if key == "packages" and pair is None:
            # A pin may hold commas of its own: `packages:torch>=2.11,<2.12`.
            values["packages"][-1] += f",{part}"
        elif key == "packages":
            values.setdefault("packages", []).append(value)
        elif key == "set":
            values.setdefault("set", {}).update(_assigned(value))
        elif pair is None:
            raise ArmError(f"expected KEY:VALUE, found {part!r}")
        elif key in values:
            raise ArmError(f"{key} is given twice")
        else:
            values[key] = value
    return values


def _assigned(text: str) -> Settings:
    try:
        return parse_assignments([text])
    except UsageError as error:
        raise ArmError(str(error).removeprefix("--")) from None


def _settings(written: Mapping[str, Any]) -> Settings:
    """Nested or dotted settings, each checked alone.

    Raises:
        ArmError: no such setting, or a value that it does not take.
    """
    settings = {}
    for dotted, value, _ in flattened(written):
        try:
            full = full_path(dotted)
            settings[full] = checked(full, value)
        except SettingError as error:
            raise ArmError(f"set: {error}") from None
    return settings


def _path(value: str | None, folder: Path) -> Path | None:
    return None if value is None else (folder / Path(value).expanduser()).absolute()


def _program(value: str | None, folder: Path) -> Path | None:
    """A bare name is looked up on PATH, anything else is a path."""
    return Path(value) if value is not None and "/" not in value else _path(value, folder)


def _pin(pin: str, folder: Path) -> str:
    """A local package as an absolute path, anything else as pip understands it."""
    local = folder / Path(pin).expanduser()
    return str(local.absolute()) if "/" in pin and local.exists() else pin
