"""Where statements of mfsdp_core begin that a call on a rank executes."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import marshal
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from bench.testing.call import FunctionCall
from bench.validate.patched_core import CORE, copy_of_core

#: Line numbers by file below mfsdp_core.
Lines = dict[str, set[int]]

#: Where a core that notes puts its lines: an attribute of `sys`, so that it imports nothing.
_NOTES = "_lines_of_mfsdp_core"
_PREAMBLE = f"import sys\n_note_line = vars(sys).setdefault({_NOTES!r}, set()).add\n"
#: Flags of a compiled file that is valid whatever its source holds (PEP 552).
_UNCHECKED = (1).to_bytes(4, "little")


@cache
def state_of_the_core() -> str:
    """A name of what all its files hold, and of how their lines are noted."""
    files = (*sorted(CORE.rglob("*.py")), Path(__file__))
    sources = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(sources).hexdigest()


def noting_core(folder: Path) -> Path:
    """Copy mfsdp_core into `folder` (which exists), so that it notes its statements as they run.

    The sources stay as they are; the notes are in what Python has compiled of them, and Python
    takes that without a look at the sources.
    """
    core = copy_of_core(folder)
    for path in core.rglob("*.py"):
        source = path.read_bytes()
        tree = _Noting(str(path.relative_to(core))).visit(ast.parse(source))
        code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        compiled = Path(importlib.util.cache_from_source(str(path)))
        compiled.parent.mkdir(exist_ok=True)
        head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
        compiled.write_bytes(head + marshal.dumps(code))
    return core


class _Noting(ast.NodeTransformer):
    """Puts before every statement a call that notes the file and the line."""

    def __init__(self, file: str) -> None:
        self._file = file

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Also into blocks within blocks."""
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [part for one in block for part in self._noted(one)])
        if isinstance(node, ast.Module):
            first = len([*takewhile(_is_first, node.body)])
            node.body[first:first] = ast.parse(_PREAMBLE).body
        return node

    def _noted(self, statement: ast.stmt) -> list[ast.stmt]:
        if _is_first(statement):
            return [statement]
        note = ast.parse(f"_note_line(({self._file!r}, {statement.lineno}))").body[0]
        return [ast.copy_location(note, statement), statement]


def _is_first(statement: ast.stmt) -> bool:
    """What has to stay the first of its block: a docstring, an import of the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def noted(call: FunctionCall) -> tuple[Any, Lines]:
    """On a rank with a core that notes: what `call` returns, and the lines that it executes."""
    start_notes()
    return call.run(), notes()


def start_notes() -> None:
    """Lines count from now on, and none so far."""
    _noted_lines().clear()


def notes() -> Lines:
    """Lines where a statement began since."""
    found: Lines = {}
    for file, line in tuple(_noted_lines()):
        found.setdefault(file, set()).add(line)
    return found


def _noted_lines() -> set[tuple[str, int]]:
    lines: set[tuple[str, int]] = vars(sys).setdefault(_NOTES, set())
    return lines


def joined(of_ranks: list[Lines]) -> Lines:
    """Lines that any rank executed."""
    found: Lines = {}
    for lines in of_ranks:
        for file, numbers in lines.items():
            found.setdefault(file, set()).update(numbers)
    return found


class CoverageFile:
    """Lines that each case executes, kept in a file of JSON lines: a run adds what is missing.

    A line counts for one state of the core.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._core = state_of_the_core()
        self._known: dict[str, tuple[float, Lines]] = {}
        if file.exists():
            for text in file.read_text().splitlines():
                one = json.loads(text)
                lines = {name: set(numbers) for name, numbers in one["lines"].items()}
                self._known[one["key"]] = one["seconds"], lines

    def of(self, what: object) -> tuple[float, Lines] | None:
        """Seconds and lines of a case (or of whatever else has a telling repr)."""
        return self._known.get(self._key(what))

    def add(self, what: object, seconds: float, lines: Lines) -> None:
        """Keep them."""
        key = self._key(what)
        self._known[key] = seconds, lines
        plain = {name: sorted(numbers) for name, numbers in lines.items()}
        with self._file.open("a") as out:
            line = {"key": key, "seconds": round(seconds, 3), "lines": plain}
            out.write(json.dumps(line) + "\n")

    def _key(self, what: object) -> str:
        return hashlib.sha256(f"{self._core} {what!r}".encode()).hexdigest()[:24]
