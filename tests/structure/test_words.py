"""Turns that a colleague would not say aloud stand in no docstring, message or page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracked import ROOT, text_of, tracked

TURNS = re.compile(
    r"(?<![\w-])(told|asked|meets|in turn|beside|by lot|of today|what nobody"
    r"|(?<!soon )(?<!far )(?<!long )as it is)(?![\w-])",
    re.IGNORECASE,
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: Evidence is a record of its day, and logs are other people's words.
LEFT_OUT = ("docs/evidence", "tests/")


def prose(path: Path) -> Iterator[str]:
    """The strings of a module, docstrings among them; a page without its code."""
    if path.suffix == ".md":
        yield FENCE.sub("", text_of(path))
        return
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_prose_has_no_turn_that_nobody_says_aloud() -> None:
    paths = [path for path in tracked() if path.suffix in {".py", ".md"}]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    used = [
        f"{name}: ... {text[max(0, turn.start() - 40) : turn.end() + 40]!r}"
        for name, path in named.items()
        if not name.startswith(LEFT_OUT)
        for text in prose(path)
        for turn in TURNS.finditer(text)
    ]
    assert not used, "\n".join(used)


@pytest.mark.parametrize("turn", ["what nobody uses", "Told by a hook", "kept as it is"])
def test_a_turn_is_found(turn: str) -> None:
    assert TURNS.search(turn)
    assert not TURNS.search("as soon as it is known, `linear-beside-the-engine`")


VAGUE = {"one", "found", "whole", "asked", "looked"}
#: Rooms where a variable says what it holds.
NAMED = (
    *("bench/derive/", "bench/doctor/", "bench/engines/", "bench/fit/", "bench/launch/"),
    *("bench/meters/", "bench/models/", "bench/resolve/", "bench/spec/", "bench/store/"),
    *("bench/testing/", "bench/validate/", "bench/worker/", "bench/cli/", "bench/importers/"),
    *("reports/", "sweeps/", "tools/"),
)


def vague_names(source: str) -> list[tuple[int, str]]:
    """Lines and names of arguments and assigned variables that say nothing; not of fields."""
    nodes = list(ast.walk(ast.parse(source)))
    fields = {id(row.target) for node in nodes if isinstance(node, ast.ClassDef)
              for row in node.body if isinstance(row, ast.AnnAssign)}  # fmt: skip
    stored = [(node.lineno, node.id) for node in nodes if isinstance(node, ast.Name)
              and isinstance(node.ctx, ast.Store) and id(node) not in fields]  # fmt: skip
    arguments = [(node.lineno, node.arg) for node in nodes if isinstance(node, ast.arg)]
    return [(line, name) for line, name in stored + arguments if name in VAGUE]


def test_variables_say_what_they_hold() -> None:
    named = {path.relative_to(ROOT).as_posix(): path for path in tracked() if path.suffix == ".py"}
    vague = [
        f"{name}:{line}: {variable}"
        for name, path in named.items()
        if name.startswith(NAMED)
        for line, variable in vague_names(text_of(path))
    ]
    assert not vague, "\n".join(vague)


def test_a_vague_name_is_found() -> None:
    assert vague_names("def f(one): found = [x for whole in one]") == [
        *((1, "found"), (1, "whole"), (1, "one")),
    ]
    assert not vague_names("class Row:\n    found: str")
