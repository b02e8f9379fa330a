"""A historical bug as a folder that can be an arm of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import UsageError
from tools.bug_in_a_copy import inject


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


@pytest.mark.parametrize(("bug", "said"), [("R99", "some of R1, "), ("no.patch", "cannot read")])
def test_a_bug_that_cannot_be_put_back_is_refused_in_words(
    tmp_path: Path, bug: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        inject(bug, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
