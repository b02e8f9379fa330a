"""A sweep file, checked: YAML on one side, a `Matrix` on the other, every error with its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bench.launch.arm.prepare import ArmRequest
from sweeps.arms import ArmError, read_arm, set_problem
from sweeps.conditions import read_condition
from sweeps.document import KeyPath, YamlDocument, read_document
from sweeps.matrix import ARM, MAX_CELLS, Condition, Matrix, Override, expand
from sweeps.reader import (
    SettingsReader,
    check_axes,
    read_axes,
    read_includes,
    read_zip_group,
)
from sweeps.schema import (
    MatrixSection,
    OverrideSection,
    RequireSection,
    SweepFile,
)
from sweeps.settings import Scalar, explain
from sweeps.suggest import did_you_mean

_SECTIONS: dict[str | int, type[BaseModel]] = {
    "matrix": MatrixSection,
    "overrides": OverrideSection,
    "require": RequireSection,
}


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
    reader = SettingsReader(document)
    file, data = _checked_shape(reader), document.data
    own = reader.settings_with_lines(data.get("base") or {}, ("base",))
    base = _inherited(reader, file.extends) | own
    arm_names = [str(name) for name in data.get("arms") or {}]
    matrix = _read_matrix(reader, file, arm_names)
    matrix = replace(matrix, base={path: value for path, (value, _) in base.items()})
    arms = _read_arms(reader, data.get("arms") or {})
    require = tuple(
        (_condition(reader, item.when, ("require", index, "when"), matrix.labels), item)
        for index, item in enumerate(file.require)
    )
    reader.stop_on_problems()
    rules = [("exclude", rule) for rule in matrix.exclude]
    rules += [("override", rule.when) for rule in matrix.overrides]
    rules += [("requirement", when) for when, _ in require]
    _check_cells(reader, matrix, arms, rules)
    reader.stop_on_problems()
    return SweepDefinition(
        name=file.name,
        description=file.description,
        matrix=matrix,
        repeat=file.repeat,
        source=document.source,
        base_lines={path: line for path, (_, line) in base.items()},
        arms=arms,
        interleave=file.interleave,
        require=require,
    )


def _inherited(reader: SettingsReader, name: str | None) -> dict[str, tuple[Scalar, int]]:
    """Settings of the base of the file that this one extends, at the line that says so."""
    if name is None:
        return {}
    beside = Path(reader.document.source).parent / name
    shipped = Path(__file__).parent / name
    other = read_document(shipped if shipped.exists() and not beside.exists() else beside)
    if other.data.get("extends") is not None:
        raise reader.document.error(
            ("extends",),
            f"extends: {name} extends {other.data['extends']}; expected a file that extends none",
        )
    line = reader.document.line(("extends",))
    return {path: (value, line) for path, value in define(other).matrix.base.items()}


def _read_arms(reader: SettingsReader, written: Mapping[str, Any]) -> tuple[ArmRequest, ...]:
    """The arms; their paths are relative to the folder of the sweep file."""
    folder = Path(reader.document.source).parent
    arms = []
    for name, what in written.items():
        try:
            arms.append(read_arm(name, {} if what is None else what, folder))
        except ArmError as error:
            reader.report(("arms", name), f"arms.{name}: {error}")
    problem = set_problem(list(written))
    if problem:
        reader.report(("arms",), f"arms: {problem}")
    return tuple(arms)


def _checked_shape(reader: SettingsReader) -> SweepFile:
    """The file but for what is checked one by one later: settings and arms."""
    apart = ("base", "arms")
    data = {key: value for key, value in reader.document.data.items() if key not in apart}
    for key in ("description", "matrix", "overrides"):
        if key in data and data[key] is None:
            del data[key]  # an empty section is an absent one
    file = None
    try:
        file = SweepFile.model_validate(data)
    except ValidationError as error:
        for item in error.errors():
            reader.report(tuple(p for p in item["loc"] if p != "[key]"), _shape_message(item))
    for key, holds in (("base", "settings"), ("arms", "names to where their code comes from")):
        section = reader.document.data.get(key)
        if section is not None and not isinstance(section, dict):
            reader.report((key,), f"{key}: expected a mapping of {holds}")
    reader.stop_on_problems()
    assert file is not None  # else there was a problem
    return file


def _read_matrix(reader: SettingsReader, file: SweepFile, arms: Sequence[str]) -> Matrix:
    written = file.matrix
    product = read_axes(reader, written.product, ("matrix", "product"))
    zips = tuple(
        read_zip_group(reader, group, ("matrix", "zip", index))
        for index, group in enumerate(written.zip)
    )
    axes = (*product, *(axis for group in zips for axis in group))
    check_axes(reader, axes)
    reader.stop_on_problems()
    include = tuple(read_includes(reader, written.include, axes, ("matrix", "include")))
    matrix = Matrix(product=product, zips=zips, include=include)
    labels = matrix.labels
    exclude = tuple(
        _condition(reader, rule, ("matrix", "exclude", index), labels)
        for index, rule in enumerate(written.exclude)
    )
    return replace(
        matrix,
        exclude=exclude,
        overrides=tuple(
            _override(reader, rule, ("overrides", index), {**labels, ARM: arms} if arms else labels)
            for index, rule in enumerate(file.overrides)
        ),
    )


def _condition(
    reader: SettingsReader, written: Any, where: KeyPath, labels: Mapping[str, Sequence[str]]
) -> Condition:
    condition, problems = read_condition(written, labels, reader.document.line(where))
    for key, message in problems:
        reader.report((*where, key) if key else where, message)
    return condition


def _override(
    reader: SettingsReader,
    rule: OverrideSection,
    where: KeyPath,
    labels: Mapping[str, Sequence[str]],
) -> Override:
    settings = reader.settings(rule.set, (*where, "set"))
    if not rule.set:
        reader.report((*where, "set"), "set: an override needs at least one setting")
    return Override(_condition(reader, rule.when, (*where, "when"), labels), settings)


def _check_cells(
    reader: SettingsReader,
    matrix: Matrix,
    arms: Sequence[ArmRequest],
    rules: Sequence[tuple[str, Condition]],
) -> None:
    """The matrix has a sensible size, and every rule of it means at least one cell."""
    if matrix.size > MAX_CELLS:
        reader.report(
            ("matrix",), f"expands to {matrix.size:,} cells; expected at most {MAX_CELLS:,}"
        )
        return
    if not expand(matrix):
        reader.report(("matrix",), "every cell is excluded; nothing is left to run")
        return
    if not rules:
        return
    plain = replace(matrix, exclude=(), overrides=())
    everything = list(expand(plain))
    for arm in arms:
        everything += expand(plain, arm.name, arm.settings)
    for kind, condition in rules:
        if not any(condition.matches(cell) for cell in everything):
            reader.report_line(condition.line, f"this {kind} matches no cell; correct or remove it")


def _shape_message(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location)
    if error["type"] == "missing":
        return f"{name}: this key is required"
    if error["type"] == "extra_forbidden":
        known = list(_section_model(error["loc"]).model_fields)
        hint = did_you_mean(location[-1], known)
        return f"unknown key {name!r}{hint or '; expected one of ' + ', '.join(known)}"
    if error["type"] == "string_pattern_mismatch" and error["loc"] == ("name",):
        return f"name: expected letters, digits, . _ - (up to 64), found {error['input']!r}"
    return f"{name}: {explain(error)}"


def _section_model(location: tuple[str | int, ...]) -> type[BaseModel]:
    return _SECTIONS.get(location[0], SweepFile) if len(location) > 1 else SweepFile
