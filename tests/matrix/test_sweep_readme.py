"""docs/: every YAML block of four pages is a sweep file that loads and plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sweeps
from bench.resolve import Machine
from sweeps.definition import parse_sweep
from sweeps.matrix import expand
from sweeps.planning import make_plan

README = (Path(sweeps.__path__[0]) / "README.md").read_text()
DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join(
    (DOCS / name).read_text() for name in ("sweep-file.md", "arms.md", "engines.md", "extending.md")
)
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)
LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
CELLS = {
    "first": 4,
    "policies": 6,
    "scaling": 6,
    "reference": 5,
    "tuned": 4,
    "short": 1,
    "losses": 3,
    "allocator": 4,
    "change": 1,
    "engines": 2,
    "compared": 4,
    "mine": 2,
}


def test_the_pages_have_the_examples_that_are_counted_here():
    assert [parse_sweep(block).name for block in BLOCKS] == list(CELLS)


@pytest.mark.parametrize("block", BLOCKS, ids=[re.match(r"name: (\w+)", b)[1] for b in BLOCKS])
def test_an_example_loads_and_plans(block: str):
    definition = parse_sweep(block)
    plan = make_plan(definition, LAPTOP)
    assert plan.size == CELLS[definition.name] == len(expand(definition.matrix))


def test_the_examples_give_the_ids_that_the_text_names():
    ids = [cell.id for cell in expand(parse_sweep(BLOCKS[3]).matrix)]
    assert "mfsdp-seq_len=64" in ids
    assert ids[-1] == "single"


def test_every_module_and_definition_is_in_the_tables():
    folder = Path(sweeps.__path__[0])
    names = {p.name for p in folder.iterdir() if p.suffix in {".py", ".yaml"}} - {"__init__.py"}
    named = set(re.findall(r"`([\w.]+\.(?:py|yaml))`", README))
    assert names - named - {"suggest.py"} == set()
