"""Settings and axes as written, with every problem at its line.

An axis is a list of values of one setting, or of bundles (a label and several settings).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.document import KeyPath, Problem, SweepFileError, YamlDocument
from sweeps.matrix import Axis, AxisValue, path_value
from sweeps.settings import (
    Scalar,
    SettingError,
    Settings,
    checked,
    flattened,
    full_path,
    short_path,
)
from sweeps.suggest import did_you_mean

_BUNDLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}\Z")
_LABEL_RULE = "expected up to 40 letters, digits and ._+-"


class SettingsReader:
    """A document and what is wrong with it so far: one run of the tool shows many problems."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self._problems: list[Problem] = []

    def report(self, path: KeyPath, message: str) -> None:
        """Note a problem at the line of `path`."""
        self.report_line(self.document.line(path), message)

    def report_line(self, line: int, message: str) -> None:
        """Note a problem at `line`."""
        self._problems.append(Problem(line, message))

    def stop_on_problems(self) -> None:
        """Raise what was noted, in the order of the file.

        Raises:
            SweepFileError: something was noted.
        """
        if self._problems:
            ordered = sorted(self._problems, key=lambda problem: problem.line or 0)
            raise SweepFileError(self.document.source, ordered)

    def settings_with_lines(self, tree: Any, path: KeyPath) -> dict[str, tuple[Scalar, int]]:
        """Nested or dotted settings below `path`: full path -> checked value and line."""
        result: dict[str, tuple[Scalar, int]] = {}
        for dotted, value, where in flattened(tree, path):
            try:
                full = full_path(dotted)
                scalar = checked(full, value)
            except SettingError as error:
                self.report(where, str(error))
                continue
            if full in result:
                self.report(where, f"{dotted} is already set on line {result[full][1]}")
            result[full] = (scalar, self.document.line(where))
        return result

    def settings(self, tree: Any, path: KeyPath) -> Settings:
        """As `settings_with_lines`, without the lines."""
        return {name: value for name, (value, _) in self.settings_with_lines(tree, path).items()}


def read_axes(
    reader: SettingsReader, written: Mapping[str, list[Any]], path: KeyPath
) -> tuple[Axis, ...]:
    """The axes of one mapping `axis: [values]`; what is wrong is reported, not returned."""
    axes = [_axis(reader, name, values, (*path, name)) for name, values in written.items()]
    return tuple(axis for axis in axes if axis is not None)


def read_zip_group(
    reader: SettingsReader, written: Mapping[str, list[Any]], path: KeyPath
) -> tuple[Axis, ...]:
    """As `read_axes` for axes that advance together, which need the same length."""
    lengths = {name: len(values) for name, values in written.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        reader.report(path, f"axes that are zipped need the same length: {found}")
    if not written:
        reader.report(path, "a zip group needs at least one axis")
    return read_axes(reader, written, path)


def check_axes(reader: SettingsReader, axes: Sequence[Axis]) -> None:
    """No axis twice, no setting on two axes: the winner would depend on the order."""
    owner: dict[str, Axis] = {}
    seen: set[str] = set()
    for axis in axes:
        if axis.name in seen:
            reader.report_line(axis.line, f"axis {axis.name} is written twice")
            continue
        seen.add(axis.name)
        for path in sorted({path for value in axis.values for path in value.settings}):
            if path in owner:
                reader.report_line(
                    axis.line,
                    f"{axis.name} sets {short_path(path)}, which axis {owner[path].name} "
                    f"(line {owner[path].line}) sets too; keep it in one of them",
                )
            owner[path] = axis


def read_includes(
    reader: SettingsReader, written: Sequence[dict[str, Any]], axes: Sequence[Axis], path: KeyPath
) -> Iterator[tuple[AxisValue, Mapping[str, str]]]:
    """Each included cell as one value (id and settings) and its labels by axis."""
    bundles = {axis.name: axis for axis in axes if "." not in axis.name}
    for index, item in enumerate(written):
        where = (*path, index)
        merged: dict[str, Scalar] = {}
        labels: dict[str, str] = {}
        parts: list[str] = []
        picks = [key for key in item if key in bundles and not isinstance(item[key], dict)]
        for name in picks:
            picked = _picked(reader, bundles[name], item[name], (*where, name))
            if picked is not None:
                merged.update(picked.settings)
                labels[name] = picked.label
                parts.append(picked.label)
        plain = {key: value for key, value in item.items() if key not in {*picks, "label"}}
        for setting, value in reader.settings(plain, where).items():
            one = path_value(short_path(setting), value)
            merged[setting] = value
            labels[short_path(setting)] = one.label
            parts.append(one.id_part(setting))
        name = item.get("label", "-".join(parts))
        if not parts:
            reader.report(where, "an included cell needs at least one setting")
        elif "label" in item and not _is_label(name):
            reader.report((*where, "label"), f"label: {_LABEL_RULE}, found {name!r}")
        else:
            yield AxisValue(name, merged, reader.document.line(where), bare=True), labels


def _axis(reader: SettingsReader, name: str, values: list[Any], path: KeyPath) -> Axis | None:
    if not values:
        reader.report(path, f"{name}: an axis needs at least one value")
        return None
    bundle = any(isinstance(value, dict) for value in values)
    try:
        shown = _bundle_name(name) if bundle else short_path(full_path(name))
    except SettingError as error:
        reader.report(path, str(error))
        return None
    read: list[AxisValue] = []
    for index, value in enumerate(values):
        where = (*path, index)
        one = _bundle(reader, value, where) if bundle else _value(reader, shown, value, where)
        if one is None:
            continue
        if any(one.label == other.label for other in read):
            reader.report(where, f"{shown}: {one.label!r} is listed twice")
        read.append(one)
    return Axis(shown, tuple(read), reader.document.line(path)) if read else None


def _bundle_name(name: str) -> str:
    if name in {"cell", "env", "label"} or not _BUNDLE_NAME.match(name):
        raise SettingError(f"{name!r} cannot name a list of bundles; use a word such as 'policy'")
    return name


def _bundle(reader: SettingsReader, value: Any, where: KeyPath) -> AxisValue | None:
    if not isinstance(value, dict) or "label" not in value:
        reader.report(where, "expected a bundle, a mapping with a `label` and settings")
        return None
    label = value["label"]
    if not _is_label(label):
        reader.report((*where, "label"), f"label: {_LABEL_RULE}, found {label!r}")
        return None
    written = {key: one for key, one in value.items() if key != "label"}
    return AxisValue(label, reader.settings(written, where), reader.document.line(where), bare=True)


def _value(reader: SettingsReader, name: str, value: Any, where: KeyPath) -> AxisValue | None:
    try:
        scalar = checked(full_path(name), value)
    except SettingError as error:
        reader.report(where, str(error))
        return None
    return path_value(name, scalar, reader.document.line(where))


def _picked(reader: SettingsReader, axis: Axis, label: Any, where: KeyPath) -> AxisValue | None:
    for value in axis.values:
        if value.label == label:
            return value
    known = [value.label for value in axis.values]
    reader.report(
        where,
        f"{axis.name}: expected one of {', '.join(known)}, found {label!r}"
        f"{did_you_mean(str(label), known)}",
    )
    return None


def _is_label(text: object) -> bool:
    return isinstance(text, str) and _LABEL.match(text) is not None
