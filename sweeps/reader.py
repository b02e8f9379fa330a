"""Reads settings out of a parsed document and collects every problem with its line."""

from __future__ import annotations

from typing import Any

from sweeps.document import KeyPath, Problem, SweepFileError, YamlDocument
from sweeps.settings import (
    Scalar,
    SettingError,
    Settings,
    checked,
    flattened,
    full_path,
)


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
