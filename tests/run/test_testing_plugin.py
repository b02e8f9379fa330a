"""The pytest plug-in, from a repository that has nothing of ours but a test file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from optional import missing

HERE = Path(__file__).parent
pytestmark = pytest.mark.processes

Outcomes = dict[str, tuple[str, str]]

A_TEST = """
from bench.testing_plugin import fsdp_oracle

test_it = fsdp_oracle("thread_bugs:FusedProductsOverwrite", programs=16)


def where(rank_of):
    import torch.distributed as dist
    return rank_of + dist.get_rank()


def test_ranks(gloo_ranks):
    assert gloo_ranks(where, 10, ranks=2) == [10, 11]
"""

#: Engine -> parts of the ids of its cases.
CASES = {
    "test_it": ("no_shard/2/stack/fp64/k3", "program/1-15", "params/2/tied/fp64/k1"),
    "engine:engine": tuple(f"params/2/{model}/fp64/k" for model in ("stack", "tied", "recomputed")),
}
ACCELERATED = "thread_bugs:accelerated"
if missing("accelerate") is None:
    # What it prepares is right in these.
    CASES[ACCELERATED] = ("no_shard/2/stack/fp64/k3", "no_shard/2/tied/fp64/k1", "program/1-15")


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    """In a folder outside of this repository: exit code and output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-p", "bench.testing_plugin", "-q", *options),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Test -> its outcome and text: a test function, and engines by `--fsdp-engine`, under xdist.

    In a folder with the files of docs/recipes/own_fsdp.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(HERE.parents[1] / "docs" / "recipes" / "own_fsdp", folder, dirs_exist_ok=True)
    (folder / "test_mine.py").write_text(A_TEST)
    others = any(
        one.path == request.path and not one.get_closest_marker("needs")
        for one in request.session.items
    )
    cases = {name: parts for name, parts in CASES.items() if others or name == ACCELERATED}
    wanted = (f"({engine} and ({' or '.join(parts)}))" for engine, parts in cases.items())
    engines = [f"--fsdp-engine={engine}" for engine in cases if ":" in engine]
    options = ("-n2", "-k", " or ".join(("test_ranks", *wanted)), "--junitxml=report.xml")
    code, text = run_pytest(folder, *engines, *options)
    assert code == others, text
    found = {}
    for case in ET.parse(folder / "report.xml").getroot().iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "skipped", "error")]
        name = f"{case.get('classname')} {case.get('name')}"
        found[name] = (ends[0].tag, ends[0].text or "") if ends else ("passed", "")
    return found


@pytest.mark.needs("accelerate")
def test_accelerate_passes_through_its_adapter(ended: Outcomes) -> None:
    found = [outcome for name, (outcome, _) in ended.items() if "accelerated " in name]
    assert found == ["passed"] * 3


def test_the_fsdp_of_the_page_passes_and_fails_where_the_page_says(ended: Outcomes) -> None:
    ends = {
        name.split("/")[2]: outcome
        for name, (outcome, _) in ended.items()
        if name.startswith("engine:engine") and name.endswith(("stack/fp64/k3", "/fp64/k1"))
    }
    assert ends == {"stack": "passed", "tied": "passed", "recomputed": "failure"}


def test_a_test_function_has_ranks_cases_and_programs_which_are_shrunk(ended: Outcomes) -> None:
    name = "test_mine test_it[{}]".format
    assert ended["test_mine test_ranks"] == ("passed", "")
    assert ended[name("no_shard/2/stack/fp64/k3")][0] == "failure"
    assert ended[name("optim_grads_params/2/tied/fp64/k1")][0] == "skipped"
    outcome, text = ended[name("program/1-15")]
    assert outcome == "failure", text
    assert "Program(" in text
    assert text.count("\n") < 300
    script = re.search(r"a script to run alone in (\S+\.py)", text)
    assert script is not None
    compile(Path(script[1]).read_text(), script[1], "exec")


def test_an_engine_that_is_not_there_ends_before_anything_starts(tmp_path: Path) -> None:
    code, text = run_pytest(tmp_path, "--fsdp-engine=no_such_module:engine")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "engine no_such_module:engine cannot be loaded" in text


WITHOUT = """
import sys

def test_nothing_of_ours_was_loaded():
    ours = {name.partition(".")[0] for name in sys.modules} & {"torch", "pydantic", "reports"}
    assert not ours
    assert {n for n in sys.modules if n.startswith("bench")} == {"bench", "bench.testing_plugin"}
"""


def test_a_run_that_does_not_use_it_loads_neither_torch_nor_anything_of_ours(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_light.py").write_text(WITHOUT)
    code, text = run_pytest(tmp_path)
    assert code == 0, text
