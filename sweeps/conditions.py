"""Conditions on cells, as `exclude`, `when`, `--only` and `--skip` write them.

A key is an axis, a setting (`engine.name`, `env.NCCL_DEBUG`) or `cell` (the id); a value is a text
or glob, or several of them. All keys must match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sweeps.matrix import Condition
from sweeps.settings import SettingError, full_path, known_paths, short_path, shown_value
from sweeps.suggest import did_you_mean

KeyProblem = tuple[str | None, str]


def read_condition(
    written: dict[str, Any], labels: Mapping[str, Sequence[str]], line: int = 1
) -> tuple[Condition, list[KeyProblem]]:
    """The condition that `{key: value or list}` means, and what is wrong with it by key.

    Args:
        written: what the user wrote.
        labels: every axis of the sweep with the labels that its cells have.
        line: where it was written.
    """
    problems: list[KeyProblem] = []
    if not written:
        problems.append((None, "a condition needs at least one key; an empty one matches all"))
    patterns: dict[str, tuple[str, ...]] = {}
    for key, value in written.items():
        values = value if isinstance(value, list) else [value]
        if not values or any(isinstance(one, dict | list) for one in values):
            problems.append((key, f"{key}: expected a value or a list of values"))
            continue
        try:
            name = _known_key(key, labels)
        except SettingError as error:
            problems.append((key, str(error)))
            continue
        patterns[name] = tuple(shown_value(one) for one in values)
        problems += [(key, message) for message in _unmatched(name, patterns[name], labels)]
    return Condition(patterns, line), problems


def _known_key(key: str, labels: Mapping[str, Sequence[str]]) -> str:
    """`key` in its printed form.

    Raises:
        SettingError: neither an axis of the sweep nor a setting of a run.
    """
    if key == "cell" or key in labels:
        return key
    try:
        return short_path(full_path(key))
    except SettingError:
        hint = did_you_mean(key, [*labels, "cell", *known_paths()])
        known = ", ".join([*labels, "cell"])
        raise SettingError(
            f"{key!r} is no axis of this sweep ({known}) and no setting{hint}"
        ) from None


def _unmatched(
    name: str, patterns: tuple[str, ...], labels: Mapping[str, Sequence[str]]
) -> list[str]:
    """Messages for patterns that no value of the axis can match."""
    known = list(dict.fromkeys(labels.get(name, ())))
    if not known:
        return []
    return [
        f"{name}: expected one of {', '.join(known)}, found {pattern!r}"
        f"{did_you_mean(pattern, known)}"
        for pattern in patterns
        if not any(fnmatchcase(label, pattern) for label in known)
    ]
