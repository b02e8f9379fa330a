"""Deliberately wrong gradients through run and gate: each regresses in every cell, by name.

Each is put into a copy of the core, which is an arm; the base is the working tree.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bug_in_a_copy import copy_of_core

pytestmark = pytest.mark.processes

SWEEP = Path(__file__).parent / "wrong_gradients" / "cells.yaml"
CELLS = {"adamw", "sgd", "clipped"}
# Of `gradient`, which a rank adds for its tensor `index` in its microbatch `count` (from 0).
WRONG = {
    "unchanged": "gradient",
    "four-times": "gradient * 4",
    "half": "gradient / 2",
    "other-sign": "-gradient",
    "no-first-microbatch": "gradient * (count % 2)",
    "no-second-rank": "gradient * (1 - torch.distributed.get_rank())",
    "no-first-of-each-unit": "gradient * (index > 0)",
    "one-layer-twice": "gradient * (2 if self._name.endswith('0') else 1)",
    "no-bias-and-norms": "gradient * (gradient.ndim > 1)",
    "no-last-row": "torch.cat([gradient[:-1], 0 * gradient[-1:]])",
    "of-the-step-before": "before(self, index, count, gradient)",
}
HEAD = """

_right = GradientBuffers.accumulate
_counts: dict[object, int] = {}
_kept: dict[object, torch.Tensor] = {}


def before(self, index, count, gradient):
    return _kept.get((self, index, count - 2), gradient)


def _accumulate(self, index, gradient, *, is_last=False):
    count = _counts[self, index] = _counts.get((self, index), -1) + 1
    _kept[self, index, count] = gradient.clone()
    _right(self, index, WRONG, is_last=is_last)


GradientBuffers.accumulate = _accumulate
"""


def command(verb: str, *arguments: str, results: Path) -> str:
    line = [sys.executable, "-m", "bench", verb, str(SWEEP), *arguments, "--results", str(results)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 3), done.stderr
    return done.stdout


def gated(folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Name -> what the gate says of losses and norms of every cell."""
    arms = ["--arm", "base=."]
    for name in names:
        copy = folder / name
        copy.mkdir(parents=True)
        file = copy_of_core(copy) / "runtime" / "gradient_buffers.py"
        file.write_text(file.read_text() + HEAD.replace("WRONG", WRONG[name]))
        arms += ["--arm", f"{name}=checkout:{copy}"]
    results = folder / "results"
    command("run", *arms, results=results)
    found = {}
    for name in names:
        sides = ("--base", "base", "--head", name)
        said = json.loads(command("gate", *arms, *sides, "--json", results=results))
        found[name] = [one for one in said["judgements"] if one["metric"] in ("loss", "grad_norm")]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [slice(0, 6), slice(6, None)], ids=["first", "rest"])
def test_ten_wrong_gradients_regress_by_name_whatever_the_optimizer(tmp_path, part):
    names = list(WRONG)[part]
    found = gated(tmp_path, names)
    for name in names:
        every = {one["cell"] for one in found[name]}
        assert every == CELLS
        wrong = {one["cell"] for one in found[name] if one["verdict"] == "regressed"}
        assert wrong == (set() if name == "unchanged" else CELLS), name
