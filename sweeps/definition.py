"""A sweep file, checked: YAML on one side, a `Matrix` on the other, every error with its line.

An axis is a list of values of one setting, or of bundles (a label and several settings).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bench.launch.arms import ArmRequest
from bench.spec import RunSpec
from sweeps.arms import ArmError, read_arm, set_problem
from sweeps.document import KeyPath, Problem, SweepFileError, YamlDocument, read_document
from sweeps.matrix import (
    ARM,
    MAX_CELLS,
    Axis,
    AxisValue,
    Condition,
    Matrix,
    Override,
    expand,
    path_value,
)
from sweeps.schema import MatrixSection, OverrideSection, RequireSection, SweepFile
from sweeps.selection import read_condition
from sweeps.settings import (
    Scalar,
    SettingError,
    Settings,
    checked,
    explain,
    flattened,
    full_path,
    short_path,
)
from sweeps.suggest import did_you_mean

_SECTIONS: dict[str | int, type[BaseModel]] = {
    "matrix": MatrixSection,
    "overrides": OverrideSection,
    "require": RequireSection,
}
_BUNDLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}\Z")


@dataclass(frozen=True)
class SweepDefinition:
    """A sweep as written: its matrix and the runs of each cell. `base_lines`: setting -> line.

    require: with the cells that each is for.
    """

    name: str
    description: str
    matrix: Matrix
    repeat: int
    source: str
    base_lines: Mapping[str, int]
    arms: tuple[ArmRequest, ...] = ()
    interleave: bool = False
    require: tuple[tuple[Condition, RequireSection], ...] = ()


def load_sweep(path: Path) -> SweepDefinition:
    """Read and check a sweep file.

    Raises:
        SweepFileError: with a line for every problem that one station of the checks found.
    """
    return define(read_document(path))


def define(document: YamlDocument) -> SweepDefinition:
    """Check a parsed document and build its matrix.

    Raises:
        SweepFileError: as `load_sweep`.
    """
    return _Reader(document).definition()


class _Reader:
    """A document and what is wrong with it so far: one run of the tool shows many problems."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self._problems: list[Problem] = []

    def report(self, where: KeyPath | int, message: str) -> None:
        """Note a problem at a line, or at the line of a path."""
        line = where if isinstance(where, int) else self.document.line(where)
        self._problems.append(Problem(line, message))

    def stop_on_problems(self) -> None:
        """Raise what was noted, in the order of the file."""
        if self._problems:
            ordered = sorted(self._problems, key=lambda problem: problem.line or 0)
            raise SweepFileError(self.document.source, ordered)

    def definition(self) -> SweepDefinition:
        """All of it, station by station."""
        file, data = self._file(), self.document.data
        arms_written = data.get("arms") or {}
        base = self._inherited(file.extends)
        base |= self._settings_with_lines(data.get("base") or {}, ("base",))
        matrix = self._matrix(file, [str(name) for name in arms_written])
        matrix = replace(matrix, base={path: value for path, (value, _) in base.items()})
        arms = self._arms(arms_written)
        require = tuple(
            (self._condition(item.when, ("require", index, "when"), matrix.labels), item)
            for index, item in enumerate(file.require)
        )
        self.stop_on_problems()
        self._check_cells(matrix, arms, [when for when, _ in require])
        self.stop_on_problems()
        return SweepDefinition(
            name=file.name,
            description=file.description,
            matrix=matrix,
            repeat=file.repeat,
            source=self.document.source,
            base_lines={path: line for path, (_, line) in base.items()},
            arms=arms,
            interleave=file.interleave,
            require=require,
        )

    def _file(self) -> SweepFile:
        """The file but for what is checked one by one later: settings and arms."""
        apart = {"base": "settings", "arms": "names to where their code comes from"}
        data = {key: value for key, value in self.document.data.items() if key not in apart}
        for key in ("description", "matrix", "overrides"):
            if key in data and data[key] is None:
                del data[key]  # an empty section is an absent one
        for key, holds in apart.items():
            if not isinstance(self.document.data.get(key) or {}, dict):
                self.report((key,), f"{key}: expected a mapping of {holds}")
        try:
            file = SweepFile.model_validate(data)
        except ValidationError as error:
            for item in error.errors():
                self.report(tuple(p for p in item["loc"] if p != "[key]"), _shape_message(item))
        self.stop_on_problems()
        return file

    def _inherited(self, name: str | None) -> dict[str, tuple[Scalar, int]]:
        """Settings of the base of the file that this one extends, at the line that says so."""
        if name is None:
            return {}
        beside = Path(self.document.source).parent / name
        shipped = Path(__file__).parent / name
        other = read_document(shipped if shipped.exists() and not beside.exists() else beside)
        line, further = self.document.line(("extends",)), other.data.get("extends")
        if further is not None:
            message = f"extends: {name} extends {further}; expected a file that extends none"
            raise SweepFileError(self.document.source, [Problem(line, message)])
        return {path: (value, line) for path, value in define(other).matrix.base.items()}

    def _settings_with_lines(self, tree: Any, path: KeyPath) -> dict[str, tuple[Scalar, int]]:
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

    def _settings(self, tree: Any, path: KeyPath) -> Settings:
        read = self._settings_with_lines(tree, path)
        return {name: value for name, (value, _) in read.items()}

    def _arms(self, written: Mapping[str, Any]) -> tuple[ArmRequest, ...]:
        """The arms; their paths are relative to the folder of the sweep file."""
        folder = Path(self.document.source).parent
        arms = []
        for name, what in written.items():
            try:
                arms.append(read_arm(name, {} if what is None else what, folder))
            except ArmError as error:
                self.report(("arms", name), f"arms.{name}: {error}")
        if problem := set_problem(list(written)):
            self.report(("arms",), f"arms: {problem}")
        return tuple(arms)

    def _matrix(self, file: SweepFile, arms: Sequence[str]) -> Matrix:
        written = file.matrix
        product = self._axes(written.product, ("matrix", "product"))
        zips = tuple(
            self._zip_group(group, ("matrix", "zip", index))
            for index, group in enumerate(written.zip)
        )
        matrix = Matrix(product=product, zips=zips)
        self._check_axes(matrix.axes)
        self.stop_on_problems()
        bundles = {axis.name: axis for axis in matrix.axes if "." not in axis.name}
        included = (
            self._included(item, bundles, ("matrix", "include", index))
            for index, item in enumerate(written.include)
        )
        matrix = replace(matrix, include=tuple(cell for cell in included if cell is not None))
        labels = matrix.labels
        labels_and_arms = {**labels, ARM: arms} if arms else labels
        return replace(
            matrix,
            exclude=tuple(
                self._condition(rule, ("matrix", "exclude", index), labels)
                for index, rule in enumerate(written.exclude)
            ),
            overrides=tuple(
                self._override(rule, ("overrides", index), labels_and_arms)
                for index, rule in enumerate(file.overrides)
            ),
        )

    def _axes(self, written: Mapping[str, list[Any]], path: KeyPath) -> tuple[Axis, ...]:
        """The axes of one mapping `axis: [values]`; what is wrong is reported, not returned."""
        axes = (self._axis(name, values, (*path, name)) for name, values in written.items())
        return tuple(axis for axis in axes if axis is not None)

    def _zip_group(self, written: Mapping[str, list[Any]], path: KeyPath) -> tuple[Axis, ...]:
        """As `_axes` for axes that advance together, which need the same length."""
        lengths = {name: len(values) for name, values in written.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            self.report(path, f"axes that are zipped need the same length: {sizes}")
        if not written:
            self.report(path, "a zip group needs at least one axis")
        return self._axes(written, path)

    def _axis(self, name: str, values: list[Any], path: KeyPath) -> Axis | None:
        if not values:
            self.report(path, f"{name}: an axis needs at least one value")
            return None
        is_bundle = any(isinstance(value, dict) for value in values)
        try:
            shown = _bundle_name(name) if is_bundle else short_path(full_path(name))
        except SettingError as error:
            self.report(path, str(error))
            return None
        read: dict[str, AxisValue] = {}
        for index, value in enumerate(values):
            where = (*path, index)
            read_value = (
                self._bundle(value, where) if is_bundle else self._value(shown, value, where)
            )
            if read_value is not None and read_value.label in read:
                self.report(where, f"{shown}: {read_value.label!r} is listed twice")
            elif read_value is not None:
                read[read_value.label] = read_value
        return Axis(shown, tuple(read.values()), self.document.line(path)) if read else None

    def _bundle(self, value: Any, where: KeyPath) -> AxisValue | None:
        if not isinstance(value, dict) or "label" not in value:
            self.report(where, "expected a bundle, a mapping with a `label` and settings")
            return None
        if not self._is_label(value["label"], where):
            return None
        written = {key: setting for key, setting in value.items() if key != "label"}
        settings = self._settings(written, where)
        return AxisValue(value["label"], settings, self.document.line(where), bare=True)

    def _value(self, name: str, value: Any, where: KeyPath) -> AxisValue | None:
        try:
            return path_value(name, checked(full_path(name), value), self.document.line(where))
        except SettingError as error:
            self.report(where, str(error))
            return None

    def _is_label(self, text: object, where: KeyPath) -> bool:
        fits = isinstance(text, str) and _LABEL.match(text) is not None
        if not fits:
            expected = "expected up to 40 letters, digits and ._+-"
            self.report((*where, "label"), f"label: {expected}, found {text!r}")
        return fits

    def _check_axes(self, axes: Sequence[Axis]) -> None:
        """No axis twice, no setting on two axes: the winner would depend on the order."""
        owner: dict[str, Axis] = {}
        seen: set[str] = set()
        for axis in axes:
            if axis.name in seen:
                self.report(axis.line, f"axis {axis.name} is written twice")
                continue
            seen.add(axis.name)
            for path in sorted({path for value in axis.values for path in value.settings}):
                if path in owner:
                    self.report(
                        axis.line,
                        f"{axis.name} sets {short_path(path)}, which axis {owner[path].name} "
                        f"(line {owner[path].line}) sets too; keep it in one of them",
                    )
                owner[path] = axis

    def _included(
        self, item: dict[str, Any], bundles: Mapping[str, Axis], where: KeyPath
    ) -> tuple[AxisValue, Mapping[str, str]] | None:
        """An included cell as one value (id and settings), and its labels by axis."""
        merged: dict[str, Scalar] = {}
        labels: dict[str, str] = {}
        parts: list[str] = []
        picks = [key for key in item if key in bundles and not isinstance(item[key], dict)]
        for name in picks:
            values = bundles[name].values
            picked = next((value for value in values if value.label == item[name]), None)
            if picked is not None:
                merged.update(picked.settings)
                labels[name] = picked.label
                parts.append(picked.label)
            else:
                known = [value.label for value in values]
                hint = did_you_mean(str(item[name]), known)
                message = f"{name}: expected one of {', '.join(known)}, found {item[name]!r}{hint}"
                self.report((*where, name), message)
        plain = {key: value for key, value in item.items() if key not in {*picks, "label"}}
        for setting, value in self._settings(plain, where).items():
            axis_value = path_value(short_path(setting), value)
            merged[setting] = value
            labels[short_path(setting)] = axis_value.label
            parts.append(axis_value.id_part(setting))
        if not parts:
            self.report(where, "an included cell needs at least one setting")
        elif "label" not in item or self._is_label(item["label"], where):
            name = item.get("label", "-".join(parts))
            return AxisValue(name, merged, self.document.line(where), bare=True), labels
        return None

    def _condition(
        self, written: Any, where: KeyPath, labels: Mapping[str, Sequence[str]]
    ) -> Condition:
        condition, problems = read_condition(written, labels, self.document.line(where))
        for key, message in problems:
            self.report((*where, key) if key else where, message)
        return condition

    def _override(
        self, rule: OverrideSection, where: KeyPath, labels: Mapping[str, Sequence[str]]
    ) -> Override:
        settings = self._settings(rule.set, (*where, "set"))
        if not rule.set:
            self.report((*where, "set"), "set: an override needs at least one setting")
        return Override(self._condition(rule.when, (*where, "when"), labels), settings)

    def _check_cells(
        self, matrix: Matrix, arms: Sequence[ArmRequest], required: Sequence[Condition]
    ) -> None:
        """The matrix has a sensible size, and every rule of it means at least one cell."""
        if matrix.size > MAX_CELLS:
            message = f"expands to {matrix.size:,} cells; expected at most {MAX_CELLS:,}"
            self.report(("matrix",), message)
            return
        if not expand(matrix):
            self.report(("matrix",), "every cell is excluded; nothing is left to run")
            return
        rules = {
            "exclude": matrix.exclude,
            "override": [rule.when for rule in matrix.overrides],
            "requirement": required,
        }
        if not any(rules.values()):
            return
        plain = replace(matrix, exclude=(), overrides=())
        cells = list(expand(plain))
        for arm in arms:
            cells += expand(plain, arm.name, arm.settings)
        for kind, conditions in rules.items():
            for condition in conditions:
                if not any(condition.matches(cell) for cell in cells):
                    message = f"this {kind} matches no cell; correct or remove it"
                    self.report(condition.line, message)


def _bundle_name(name: str) -> str:
    if name in {"cell", "env", "label"} or not _BUNDLE_NAME.match(name):
        raise SettingError(f"{name!r} cannot name a list of bundles; use a word such as 'policy'")
    return name


def _shape_message(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location)
    if error["type"] == "missing":
        return f"{name}: this key is required"
    if error["type"] == "extra_forbidden":
        section = _SECTIONS.get(location[0], SweepFile) if len(location) > 1 else SweepFile
        known = list(section.model_fields)
        elsewhere: dict[str, type[BaseModel]]
        elsewhere = {"the file itself": SweepFile, "base": RunSpec, "matrix": MatrixSection}
        homes = [home for home, of in elsewhere.items() if location[-1] in of.model_fields]
        hint = f"; it is a key of {homes[0]}" if homes else did_you_mean(location[-1], known)
        return f"unknown key {name!r}{hint or '; expected one of ' + ', '.join(known)}"
    if error["type"] == "string_pattern_mismatch" and location == ["name"]:
        return f"name: expected letters, digits, . _ - (up to 64), found {error['input']!r}"
    return f"{name}: {explain(error)}"
