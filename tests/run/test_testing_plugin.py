"""The pytest plug-in, from a repository that has nothing of ours but a test file."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from thread_bugs import not_averaged

from bench.validate.cases import Case
from bench.validate.toy_models import build_toy_model, microbatch

pytest_plugins = ["bench.testing_plugin"]

HERE = Path(__file__).parent
pytestmark = pytest.mark.processes

#: The thread, the engine of `thread_bugs`, the case that catches it, and what it is told as.
THREADS = (
    ("Megatron-LM#7566", "not_averaged", "no_shard/2/stack/fp64/k3", "own contribution"),
    ("verl#7493", "fsdp_size_of_one", "no_shard/2/stack/fp64/k3", "own contribution"),
    (
        "Megatron-LM#5956",
        "ExpertsTimesTheirGroup",
        "no_shard/4/experts/fp64/k2",
        "2 times what",
    ),
    ("Megatron-LM#5972", "OuterStageLeftOut", "no_shard/2x2hsdp/stack/fp64/k3", "outer stage did"),
    ("Megatron-LM#6357", "FusedProductsOverwrite", "no_shard/2/stack/fp64/k3", "last microbatch"),
    ("Fast-LLM#551", "SharedBuffersOverwrite", "no_shard/1/stack/fp64/k3", "last microbatch"),
    ("Megatron-LM#5974", "stepped_before", "no_shard/2/stack/fp64/k3", "optimizer step"),
)


def run_pytest(folder: Path, *options: str, paths: tuple[Path, ...] = ()) -> tuple[int, str]:
    """In a folder outside of this repository: exit code and output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-p", "bench.testing_plugin", "-q", *options),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Test -> its outcome and text, of a JUnit file."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "skipped", "error")]
        name = f"{case.get('classname')} {case.get('name')}"
        found[name] = (ends[0].tag, ends[0].text or "") if ends else ("passed", "")
    return found


#: What accelerate prepares is right in these, and the FSDP of docs/plugin.md in the first two.
OF_ACCELERATE = ("no_shard/2/stack/fp64/k3", "no_shard/2/tied/fp64/k1", "program/1-15")
OF_THE_PAGE = tuple(f"params/2/{model}/fp64/k" for model in ("stack", "tied", "recomputed"))


def asked() -> dict[str, set[str]]:
    """Engine -> parts of the ids of its cases."""
    cases = {case for _, _, case, _ in THREADS}
    found = {f"thread_bugs:{name}": cases for name in ("Averaging", *(one[1] for one in THREADS))}
    if importlib.util.find_spec("accelerate") is not None:
        found["thread_bugs:accelerated"] = {*OF_ACCELERATE}
    return found | {"engine:engine": {*OF_THE_PAGE}}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """All engines by `--fsdp-engine`, their cases alone, in a folder with the files of the page."""
    folder = tmp_path_factory.mktemp("elsewhere")
    page = (HERE.parents[1] / "docs" / "plugin.md").read_text()
    files = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, text in zip(("my_fsdp.py", "engine.py"), files, strict=False):
        (folder / name).write_text(text)
    wanted = (f"({engine} and ({' or '.join(sorted(cases))}))" for engine, cases in asked().items())
    options = ("-k", " or ".join(wanted), "--junitxml=report.xml")
    engines = [f"--fsdp-engine={engine}" for engine in asked()]
    code, text = run_pytest(folder, *engines, *options, paths=(HERE,))
    assert code == 1, text
    return outcomes(folder / "report.xml")


def told(ended: dict[str, tuple[str, str]], engine: str, case: str) -> tuple[str, str]:
    return ended[f"thread_bugs:{engine} {case}"]


@pytest.mark.parametrize(("thread", "engine", "case", "said"), THREADS)
def test_the_bug_of_a_public_thread_is_told_as_what_it_is(ended, thread, engine, case, said):
    outcome, text = told(ended, engine, case)
    assert outcome == "failure", thread
    assert said in text, text


def test_the_same_engine_without_a_bug_has_right_gradients_in_all_of_these_cases(ended):
    for case in {case for _, _, case, _ in THREADS}:
        outcome, text = told(ended, "Averaging", case)
        # Torch's clipping knows nothing of experts that other ranks hold.
        lines = text.splitlines()[1:]
        assert outcome == "passed" or (
            "experts" in case and lines[0].strip().startswith("norm and clipping")
        ), text


def losses(different: bool) -> list[float]:
    """On a rank: two steps of the engine that averages nothing."""
    resolved = Case("thread_bugs:not_averaged", "no_shard").resolved("cpu")
    model = build_toy_model("stack", torch.float64, torch.device("cpu"))
    engine = not_averaged(model, resolved, torch.device("cpu"))
    found = []
    for step in range(3):
        batch = microbatch(dist.get_rank() if different else 0, 0, step, torch.device("cpu"))
        found.append(float(engine.forward_backward(*batch, 1.0, True)))
        engine.optimizer_step()
        engine.zero_grad()
    return [*found, float(sum(p.sum() for p in model.parameters()))]


def test_a_parity_test_with_the_same_data_on_all_ranks_misses_what_the_cases_catch(
    gloo_ranks: Callable[..., list[list[float]]],
) -> None:
    alone = gloo_ranks(losses, False, ranks=1)[0]
    assert gloo_ranks(losses, False, ranks=2) == [alone, alone]  # parity, and it averages nothing
    first, second = gloo_ranks(losses, True, ranks=2)
    assert first != second


def test_accelerate_passes_through_its_adapter(ended) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for part in OF_ACCELERATE:
        (found,) = (v for n, v in ended.items() if "accelerated " in n and n.endswith(part))
        assert found[0] == "passed", found


def test_the_fsdp_of_the_page_passes_and_fails_where_the_page_says(ended) -> None:
    ends = {
        name.split("/")[2]: outcome
        for name, (outcome, _) in ended.items()
        if name.startswith("engine:engine") and name.endswith(("stack/fp64/k3", "/fp64/k1"))
    }
    assert ends == {"stack": "passed", "tied": "passed", "recomputed": "failure"}


A_TEST = """
from bench.testing_plugin import fsdp_oracle

test_it = fsdp_oracle("thread_bugs:FusedProductsOverwrite", programs=16)


def where(rank_of):
    import torch.distributed as dist
    return rank_of + dist.get_rank()


def test_ranks(gloo_ranks):
    assert gloo_ranks(where, 10, ranks=2) == [10, 11]
"""


def test_a_test_function_has_cases_and_programs_which_are_shrunk_under_xdist(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_mine.py").write_text(A_TEST)
    wanted = "test_ranks or (2/stack/fp64/k3 and no_shard) or program/1-15 or params/2/tied/fp64/k1"
    options = ("-n2", "-k", wanted, "--junitxml=report.xml")
    code, text = run_pytest(tmp_path, *options, paths=(HERE,))
    found = outcomes(tmp_path / "report.xml")
    name = "test_mine test_it[{}]".format
    assert code == 1, text
    assert found["test_mine test_ranks"] == ("passed", "")
    assert found[name("no_shard/2/stack/fp64/k3")][0] == "failure"
    refused = found[name("optim_grads_params/2/tied/fp64/k1")]
    assert refused[0] == "skipped"
    outcome, text = found[name("program/1-15")]
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
