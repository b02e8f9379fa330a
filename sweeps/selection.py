"""Which cells are meant, and what the command line adds to a sweep: `--set`, `--only`, `--skip`.

--set PATH=VALUE      fixes a setting in every cell; VALUE is read as YAML (`null`, `8`, `bf16`)
--only EXPR           keeps cells that match; several of them: any
--skip EXPR           drops cells that match; several of them: any
EXPR                  KEY=PATTERN[|PATTERN...][,KEY=...]; a file writes {KEY: PATTERN or list}
KEY                   an axis, a setting (`engine.name`, `env.NCCL_DEBUG`) or `cell` (the id)
PATTERN               a text or glob; all keys must match
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from bench.errors import UsageError
from sweeps.document import SweepFileError, parse_document
from sweeps.matrix import Condition, MatrixCell
from sweeps.settings import (
    Scalar,
    SettingError,
    Settings,
    checked,
    full_path,
    known_paths,
    short_path,
    shown_value,
)
from sweeps.suggest import did_you_mean


def read_condition(
    written: dict[str, Any], labels: Mapping[str, Sequence[str]], line: int = 1
) -> tuple[Condition, list[tuple[str | None, str]]]:
    """The condition that `{key: value or list}` means, and what is wrong with it by key.

    Args:
        written: what the user wrote.
        labels: every axis of the sweep with the labels that its cells have.
        line: where it was written.
    """
    problems: list[tuple[str | None, str]] = []
    if not written:
        problems.append((None, "a condition needs at least one key; an empty one matches all"))
    patterns: dict[str, tuple[str, ...]] = {}
    for key, value in written.items():
        values = value if isinstance(value, list) else [value]
        if not values or any(isinstance(single, dict | list) for single in values):
            problems.append((key, f"{key}: expected a value or a list of values"))
            continue
        try:
            name = _known_key(key, labels)
        except SettingError as error:
            problems.append((key, str(error)))
            continue
        patterns[name] = tuple(shown_value(single) for single in values)
        known = list(dict.fromkeys(labels.get(name, ())))
        problems += [
            (
                key,
                f"{name}: expected one of {', '.join(known)}, found {pattern!r}"
                f"{did_you_mean(pattern, known)}",
            )
            for pattern in patterns[name]
            if known and not any(fnmatchcase(label, pattern) for label in known)
        ]
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


def parse_assignments(texts: Iterable[str]) -> dict[str, Scalar]:
    """`PATH=VALUE` texts as checked settings, the later of two winning.

    Raises:
        UsageError: no `=`, no such setting, or a value that the setting does not take.
    """
    settings: dict[str, Scalar] = {}
    for text in texts:
        path, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--set {text}: expected PATH=VALUE, as in --set train.steps=50")
        try:
            full = full_path(path.strip())
            settings[full] = checked(full, yaml_value(value))
        except UsageError as error:
            raise UsageError(f"--set {text}: {error}") from None
    return settings


def yaml_value(text: str) -> object:
    """The text read as YAML; what is not YAML (`a: b`, `*`) is the text itself."""
    if not text:
        return ""
    try:
        return parse_document(f"value: {text}", "--set").data["value"]
    except SweepFileError:
        return text


def variant_name(name: str, fixed: Settings) -> str:
    """The id of a sweep run with `--set`: its records must not mix with the plain sweep's."""
    if not fixed:
        return name
    text = json.dumps(dict(sorted(fixed.items())), sort_keys=True)
    return f"{name}-set-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def selected(
    only: Sequence[str], skip: Sequence[str], cells: Sequence[MatrixCell]
) -> tuple[str, ...]:
    """Ids of the cells that the expressions mean; without any, of all.

    Raises:
        UsageError: a malformed expression, an unknown key or value, or nothing is left.
    """
    labels: dict[str, list[str]] = {}
    for cell in cells:
        for name, label in cell.labels.items():
            labels.setdefault(name, []).append(label)
    wanted = [_condition("--only", text, labels) for text in only]
    unwanted = [_condition("--skip", text, labels) for text in skip]
    kept = [cell for cell in cells if any(rule.matches(cell) for rule in wanted)] if only else cells
    ids = tuple(cell.id for cell in kept if not any(rule.matches(cell) for rule in unwanted))
    if cells and not ids:
        given = [f"--only {text}" for text in only] + [f"--skip {text}" for text in skip]
        raise UsageError(f"no cell is left by {' '.join(given)}; `plan` lists the cells")
    return ids


def _condition(option: str, text: str, labels: Mapping[str, Sequence[str]]) -> Condition:
    written: dict[str, list[str]] = {}
    for part in text.split(","):
        key, separator, patterns = part.partition("=")
        if not separator or not key.strip() or not patterns.strip():
            raise UsageError(f"{option} {text}: expected KEY=PATTERN, found {part!r}")
        if key.strip() in written:
            raise UsageError(f"{option} {text}: {key.strip()} is given twice; write a|b")
        written[key.strip()] = [pattern.strip() for pattern in patterns.split("|")]
    condition, problems = read_condition(written, labels)
    if problems:
        raise UsageError(f"{option} {text}: {problems[0][1]}")
    return condition
