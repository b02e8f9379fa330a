"""docs/core-guide.md: its code runs, and what it names exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.judging import same
from mfsdp_core import fully_shard, fully_shard_model, fully_shard_optimizer
from oracle.models import Block, batch, build, loss
from oracle.ranks import mesh
from oracle.reference import Named
from oracle.sharded import Sharded
from sweeps.settings import known_paths

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "core-guide.md").read_text()
NAME = "linear_stack"


def two_ways() -> tuple[str, str]:
    """The two code blocks under "Two ways to use it"."""
    section = GUIDE.split("## Two ways to use it")[1].split("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return first, second


def trained(code: str) -> Named:
    """In a rank: weights after two steps of a loop around the model that `code` builds."""
    names: dict[str, Any] = {
        "module": build(NAME),
        "torch": torch,
        "TransformerLayer": Block,
        "fully_shard": fully_shard,
        "fully_shard_model": fully_shard_model,
        "fully_shard_optimizer": fully_shard_optimizer,
    }
    exec(code, names)  # noqa: S102 - code of our own guide
    model, optimizer = names["model"], names["optimizer"]
    rank = mesh(4).get_local_rank("dp")
    for cycle in range(2):
        loss(model(batch(NAME, rank, 0, torch.float32, cycle))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Sharded(NAME, 4, torch.float32, model).full_parameters()


def table_columns() -> list[list[str]]:
    section = GUIDE.split("## The table")[1].split("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


@pytest.mark.on_ranks
def test_both_ways_of_use_train_to_the_same_bits() -> None:
    first, second = two_ways()
    assert "fully_shard_optimizer(" in first
    assert "fully_shard(" in second
    same("weights", trained(first), trained(second))


def test_every_argument_in_the_table_is_one_of_the_functions() -> None:
    known = set(inspect.signature(fully_shard_model).parameters)
    rows = table_columns()
    assert len(rows) >= 15
    for row in rows:
        for argument in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", row[3].split("(")[0]):
            assert argument in known, row[0]


def test_every_sweep_axis_in_the_table_is_a_setting_of_a_run() -> None:
    axes = {axis for row in table_columns() for axis in re.findall(r"`([a-z_.]+)`", row[5])}
    assert {"engine.strategy", "engine.outer_size", "model.recompute", "dtypes.grad_comm"} <= axes
    assert axes - set(known_paths()) == set()


def test_every_argument_of_the_functions_is_explained_in_the_pages_of_the_core() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("core-*.md"))
    explained_in_docstring = inspect.getdoc(fully_shard_model) or ""
    for argument in inspect.signature(fully_shard_model).parameters:
        assert argument in text or argument in explained_in_docstring, argument


def test_every_file_and_state_of_a_step_is_one_of_the_core() -> None:
    section = GUIDE.split("## A step")[1].split("\n## ")[0]
    core = Path(inspect.getfile(fully_shard_model)).parent
    files = {str(path.relative_to(core)) for path in core.rglob("*.py")}
    named = re.findall(r"`([a-z_/0-9]+\.py)`", section)
    assert len(named) >= 15
    for row in section.splitlines():
        folder = ""
        for name in re.findall(r"`([a-z_/0-9]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            assert f"{folder}/{name.rpartition('/')[2]}" in files, (row, name)
