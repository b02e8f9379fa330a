"""A YAML file as plain data plus the line of every key and item, or one clear refusal.

Numbers and words follow YAML 1.2: `yes` is a word, `3e-4` is a number. `read_document` raises
`SweepFileError` whatever is wrong with a file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml import events as ev
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from bench.errors import UsageError

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 24
#: Aliases may expand to more than was written.
MAX_VALUES: Final = 50_000
KeyPath = tuple[str | int, ...]

#: With the parser's own slips on damaged input; the file is at fault.
_ERRORS: Final = (YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_TAG: Final = "tag:yaml.org,2002:"
#: Numbers and words that are read as such: the largest, and what is expected.
_SCALARS: Final = {
    f"{_TAG}null": (0.0, ""),
    f"{_TAG}bool": (1.0, ""),
    f"{_TAG}int": (2**63 - 1, "an integer below 2^63"),
    f"{_TAG}float": (math.nextafter(math.inf, 0), "a finite number"),
}


@dataclass(frozen=True)
class Problem:
    """One thing to change; `line` counts from 1, None is the file as a whole."""

    line: int | None
    message: str


class SweepFileError(UsageError):
    """A sweep file that cannot be used: one `file.yaml:LINE: message` for each problem."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        super().__init__(
            "\n".join(
                f"{source}{'' if problem.line is None else f':{problem.line}'}: {problem.message}"
                for problem in problems
            )
        )


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


def read_document(path: Path, first: str = "name") -> YamlDocument:
    """Read and parse `path`; `first`: a key of such a file, for messages.

    Raises:
        SweepFileError: whatever is wrong with the file.
    """
    source = str(path)
    try:
        if path.is_dir():
            raise _refusal(source, None, "expected a YAML file, found a folder")
        if path.exists() and not path.is_file():
            raise _refusal(source, None, "expected a regular file, found a device, pipe or socket")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _refusal(
                source, None, f"a file has at most {MAX_BYTES:,} bytes, found {size:,} bytes"
            )
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise _refusal(source, None, "no such file") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"expected UTF-8 text, found byte 0x{raw[error.start]:02x}"
        raise _refusal(source, line, message) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(source, None, f"cannot be read: {reason}") from None
    return parse_document(text, source, first)


def parse_document(text: str, source: str, first: str = "name") -> YamlDocument:
    """Parse YAML text; `source` names it in messages, with a key of such a file, `first`.

    Raises:
        SweepFileError: not YAML 1.2, not one mapping, or a key is written twice.
    """
    expected = f"expected a mapping (`{first}: ...`)"
    if not text.strip():
        raise _refusal(source, None, f"the file is empty; {expected}")
    builder = _Builder(source)
    root = builder.compose(text)
    if root is None:
        raise _refusal(source, None, f"the file has no content; {expected}")
    data = builder.convert(root, ())
    if not isinstance(data, dict):
        kind = {list: "a list", type(None): "nothing"}.get(type(data), "a single value")
        raise _refusal(source, 1, f"{expected}, found {kind}")
    return YamlDocument(source, data, builder.lines)


def _refusal(source: str, line: int | None, message: str) -> SweepFileError:
    return SweepFileError(source, [Problem(line, message)])


class _Builder:
    """Turns nodes into plain data with `lines`."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[KeyPath, int] = {(): 1}
        self._constructor = YAML(typ="safe", pure=True).constructor

    def compose(self, text: str) -> Node | None:
        """The nodes of the one document in `text`; None if it has no content."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._check_events(text)
                root: Node | None = YAML(typ="safe", pure=True).compose(text)
        except SweepFileError:
            raise
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else None
            what = " ".join(str(error.problem or error.context or "cannot be parsed").split())
            raise _refusal(self.source, line, f"not valid YAML: {what}") from None
        except _ERRORS as error:
            words = str(error) if isinstance(error, YAMLError) else type(error).__name__
            what = " ".join(words.split())[:200]
            raise _refusal(self.source, None, f"not valid YAML: {what}") from None
        return root

    def _check_events(self, text: str) -> None:
        """Refuse tags, what is too deep for the composer, directives and a second document."""
        depth = documents = 0
        for event in YAML(typ="safe", pure=True).parse(text):
            if tag := getattr(event, "tag", None):
                raise self._refused(event, f"tags are not accepted: remove `{tag}`")
            depth += isinstance(event, ev.CollectionStartEvent)
            depth -= isinstance(event, ev.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise self._refused(event, f"nested deeper than {MAX_DEPTH} levels")
            if isinstance(event, ev.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    message = "one document is expected, a second `---` begins here"
                    raise self._refused(event, message)
                if event.version is not None or event.tags:
                    message = "`%` directives are not accepted; remove the line"
                    raise self._refused(event, message)

    def convert(self, node: Node, path: KeyPath) -> Any:
        """The plain data of a node."""
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self._child(item, item, (*path, n)) for n, item in enumerate(node.value)]
        return str(node.value)

    def _refused(self, node: Any, message: str) -> SweepFileError:
        return _refusal(self.source, node.start_mark.line + 1, message)

    def _child(self, named: Node, node: Node, path: KeyPath) -> Any:
        self.lines[path] = named.start_mark.line + 1
        if len(path) >= MAX_DEPTH:
            raise self._refused(node, "an alias nests too deeply or contains itself")
        if len(self.lines) > MAX_VALUES:
            raise self._refused(node, f"expands to more than {MAX_VALUES:,} values")
        return self.convert(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise self._refused(key, "a key must be a word, found a list or mapping")
            name = key.value
            if key.tag == f"{_TAG}merge":
                raise self._refused(key, "`<<` is not accepted; write the keys out")
            if key.tag != f"{_TAG}str":
                raise self._refused(key, f"a key must be a word; quote it: '{name}'")
            if name in result:
                before = self.lines[*path, name]
                raise self._refused(key, f"key {name!r} is already on line {before}")
            result[name] = self._child(key, value, (*path, name))
        return result

    def _scalar(self, node: ScalarNode) -> Any:
        largest, expected = _SCALARS[str(node.tag)]
        try:
            value = self._constructor.construct_object(node)
        except ValueError:
            value = math.inf
        if value is not None and not abs(value) <= largest:
            raise self._refused(node, f"{node.value[:40]!r} is not {expected}")
        return value
