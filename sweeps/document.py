"""A YAML file as plain data plus the line of every key and item, or one clear refusal.

The file is a stranger's: it may be a folder, 100 MB long, not text, nested a thousand deep or made
of aliases that expand without end. `read_document` raises `SweepFileError` for all of that, and
nothing else. Numbers and words follow YAML 1.2: `yes` is a word, `3e-4` is a number.
"""

from __future__ import annotations

import math
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import events as ev
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.parser import Parser

from bench.errors import UsageError

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 50_000
MAX_INTEGER = 2**63 - 1

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Problem:
    """One thing to change; `line` counts from 1, None is the file as a whole."""

    line: int | None
    message: str


class SweepFileError(UsageError):
    """A sweep file that cannot be used: one `file.yaml:LINE: message` for each problem."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(_shown(source, problem) for problem in self.problems))


def _shown(source: str, problem: Problem) -> str:
    where = source if problem.line is None else f"{source}:{problem.line}"
    return f"{where}: {problem.message}"


@dataclass(frozen=True)
class YamlDocument:
    """Parsed YAML. `lines` maps the path of a key or a list item to its line, counted from 1."""

    source: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def line(self, path: Iterable[str | int]) -> int:
        """The line of `path`, or of its nearest known ancestor."""
        known = tuple(path)
        while known and known not in self.lines:
            known = known[:-1]
        return self.lines.get(known, 1)

    def error(self, path: Iterable[str | int], message: str) -> SweepFileError:
        """A refusal that points at `path`."""
        return SweepFileError(self.source, [Problem(self.line(path), message)])


def read_document(path: Path, first: str = "name") -> YamlDocument:
    """Read and parse `path`; `first`: a key of such a file, for messages.

    Raises:
        SweepFileError: whatever is wrong with the file.
    """
    return parse_document(_read_text(path), str(path), first)


def parse_document(text: str, source: str, first: str = "name") -> YamlDocument:
    """Parse YAML text; `source` names it in messages, with a key of such a file, `first`.

    Raises:
        SweepFileError: not YAML 1.2, not one mapping, hostile, or a key is written twice.
    """
    root = _compose(text, source, first)
    builder = _Builder(source)
    data = builder.convert(root, (), 1)
    if not isinstance(data, dict):
        raise _refusal(source, 1, f"expected a mapping (`{first}: ...`), found {_kind(data)}")
    return YamlDocument(source, data, builder.lines)


def _read_text(path: Path) -> str:
    source = str(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise _refusal(source, None, "expected a YAML file, found a folder")
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(source, None, "expected a regular file, found a device, pipe or socket")
        if status.st_size > MAX_FILE_BYTES:
            size = f"{status.st_size:,} bytes"
            raise _refusal(
                source, None, f"a file has at most {MAX_FILE_BYTES:,} bytes, found {size}"
            )
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _refusal(source, None, "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(source, None, f"cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refusal(
            source, line, f"expected UTF-8 text, found byte 0x{raw[error.start]:02x}"
        ) from None


def _refusal(source: str, line: int | None, message: str) -> SweepFileError:
    return SweepFileError(source, [Problem(line, message)])


def _compose(text: str, source: str, first: str) -> Node:
    """The node graph of the one document in `text`."""
    if not text.strip():
        raise _refusal(source, None, f"the file is empty; expected a mapping (`{first}: ...`)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yaml = YAML(typ="safe", pure=True)
            yaml.Parser = _CheckedParser
            yaml.parser.source = source
            root: Node | None = yaml.compose(text)
    except SweepFileError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        what = " ".join(str(error.problem or error.context or "cannot be parsed").split())
        raise _refusal(source, line, f"not valid YAML: {what}") from None
    except YAMLError as error:
        what = " ".join(str(error).split())
        raise _refusal(source, None, f"not valid YAML: {what[:200]}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The parser's own slips on damaged input; the file is at fault, not the user's machine.
        raise _refusal(source, None, f"not valid YAML: {type(error).__name__}") from None
    if root is None:
        raise _refusal(
            source, None, f"the file has no content; expected a mapping (`{first}: ...`)"
        )
    return root


class _CheckedParser(Parser):
    """Refuses what is too deep, tags, directives and a second document, before it is built."""

    source = ""
    _depth = 0
    _documents = 0

    def get_event(self) -> Any:
        event = super().get_event()
        line = event.start_mark.line + 1
        if isinstance(event, ev.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                message = "one document is expected, a second `---` begins here"
                raise _refusal(self.source, line, message)
            if event.version is not None or event.tags:
                message = "`%` directives are not accepted; remove the line"
                raise _refusal(self.source, line, message)
        elif isinstance(event, ev.MappingStartEvent | ev.SequenceStartEvent):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise _refusal(self.source, line, f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, ev.MappingEndEvent | ev.SequenceEndEvent):
            self._depth -= 1
        if getattr(event, "tag", None) is not None:
            raise _refusal(self.source, line, f"tags are not accepted: remove `{event.tag}`")
        return event


class _Builder:
    """Turns nodes into plain data, counting what aliases expand to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[KeyPath, int] = {(): 1}
        self._nodes = 0

    def convert(self, node: Node, path: KeyPath, depth: int) -> Any:
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _refusal(self.source, line, f"expands to more than {MAX_NODES:,} values")
        if depth > MAX_DEPTH:
            # Only an alias can still get here: the text itself was measured as it was parsed.
            raise _refusal(self.source, line, "an alias nests too deeply or contains itself")
        if isinstance(node, MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                self.lines[(*path, index)] = child.start_mark.line + 1
                items.append(self.convert(child, (*path, index), depth + 1))
            return items
        return _scalar(node, self.source)

    def _mapping(self, node: MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise _refusal(self.source, line, "a key must be a word, found a list or mapping")
            key = key_node.value
            if key_node.tag == _TAG + "merge":
                raise _refusal(self.source, line, "`<<` is not accepted; write the keys out")
            if key_node.tag != _TAG + "str":
                raise _refusal(self.source, line, f"a key must be a word; quote it: '{key}'")
            if key in result:
                before = first_line[key]
                raise _refusal(self.source, line, f"key {key!r} is already on line {before}")
            first_line[key] = line
            self.lines[(*path, key)] = line
            result[key] = self.convert(value_node, (*path, key), depth + 1)
        return result


def _scalar(node: Node, source: str) -> str | int | float | bool | None:
    line = node.start_mark.line + 1
    text = node.value
    kind = (node.tag or "").removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return bool(text.lower() == "true")
    if kind == "int":
        return _integer(text, source, line)
    if kind == "float":
        return _float(text, source, line)
    return str(text)


def _integer(text: str, source: str, line: int) -> int:
    digits = text.replace("_", "").lower()
    based = digits.lstrip("+-")[:2] in {"0x", "0o", "0b"}
    try:
        value = int(digits, 0 if based else 10)
    except ValueError:
        value = MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise _refusal(source, line, f"{text[:40]!r} is not an integer below 2^63")
    return value


def _float(text: str, source: str, line: int) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _refusal(source, line, f"{text[:40]!r} is not a finite number")
    return value


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else "a single value"
