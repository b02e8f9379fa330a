"""Mutants are the same for ever; a historical bug can be put into a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import UsageError
from tools.bug_in_a_copy import CORE, inject
from tools.mutants import mutants_of, sample

SOURCE = '''"""Text."""

def divided(total: int, ranks: int = 2) -> float:
    """More text."""
    if ranks < 1:
        raise ValueError(f"{ranks - 1} is too few")
    work.wait()
    publish(total + 1)
    self.inner = total / ranks
    return self.inner
'''


def changed(kind: str) -> list[str]:
    found = [m for m in mutants_of("runtime/x.py", SOURCE) if m.kind == kind]
    return [line for m in found for line in m.source(SOURCE).splitlines() if line not in LINES]


LINES = SOURCE.splitlines()


def test_every_kind_of_change_is_made_where_results_depend_on_it() -> None:
    assert changed("condition negated") == ["    if (not (ranks < 1)):"]
    assert changed("comparison shifted") == ["    if (ranks <= 1):"]
    assert changed("wait skipped") == ["    pass"]
    assert changed("operator changed") == ["    self.inner = (total * ranks)"]
    assert changed("exchanged") == ["    return self.outer"]
    assert changed("statement dropped") == ["        pass", "    pass"]
    assert changed("number shifted") == [
        "def divided(total: int, ranks: int = 3) -> float:",
        "    if ranks < 2:",
    ]


def test_a_sample_has_mutants_of_every_room_and_depends_on_the_seed_alone() -> None:
    rooms = {path.name for path in CORE.iterdir() if path.is_dir() and path.name[0] != "_"}
    drawn = sample(seed=3, count=2 * len(rooms))
    first = {mutant.file.partition("/")[0] for mutant in drawn[: len(rooms) + 1]}
    assert rooms <= first
    assert drawn == sample(seed=3, count=2 * len(rooms))
    assert drawn != sample(seed=4, count=2 * len(rooms))


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "x: Literal[2]",
        "import os",
        'raise ValueError(f"{n + 1} is too many")',
        "def __repr__(self):\n    return str(self.n + 1)",
        "if TYPE_CHECKING:\n    import os",
        "log.warning(n + 1)",
        "assert n + 1",
    ],
)
def test_what_no_result_depends_on_is_left_alone(source: str) -> None:
    kinds = {mutant.kind for mutant in mutants_of("x.py", source)}
    assert kinds <= ({"statement dropped"} if source.startswith("raise") else set())


def test_the_copy_has_the_bug_and_nothing_else_in_it(tmp_path: Path) -> None:
    copy = inject("R1", tmp_path / "new" / "with_r1")
    source = Path(__file__).parents[2] / "mfsdp_core"
    assert copy == tmp_path / "new" / "with_r1" / "mfsdp_core"
    differing = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if (copy / file.relative_to(source)).read_text() != file.read_text()
    }
    assert differing == {"runtime/gradient_buffers.py"}


@pytest.mark.parametrize("bug", ["R99", "no.patch"])
def test_a_bug_that_cannot_be_put_back_is_refused_in_words(tmp_path: Path, bug: str) -> None:
    with pytest.raises(UsageError, match=f"as R1; found {bug}"):
        inject(bug, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
