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
