from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_run

from bench.launch.code import RankCode, code_identity
from bench.launch.rank_entry.mfsdp_bench_rank import collect, combined, differences

ROOT = Path(__file__).resolve().parents[2]


def identity(engine: str, checkout: Path) -> str:
    return code_identity(small_run(engine), RankCode(checkout, sys.executable))


FILES = """
    bench/worker/rank.py bench/loop.py bench/spec/run.py bench/store/atomic.py bench/cli/main.py
    bench/models/llama.py bench/data/source.py bench/meters/memory.py bench/engines/stock.py
    bench/engines/single.py bench/engines/ddp.py bench/engines/fsdp2.py bench/engines/mfsdp.py
    mfsdp_core/runtime/hooks.py reports/build.py
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with one file of every kind."""
    for file in FILES.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"# {file}\n")
    return tmp_path


def test_a_look_says_where_a_package_and_its_loaded_modules_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "pkg").mkdir(parents=True)
        for name in ("__init__", "part"):
            (tmp_path / place / "pkg" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "one")
    wanted = {"pkg": {"patterns": ["pkg/*.py"], "root": "/arm"}}
    asked = {"arm": "x", "packages": wanted, "distributions": {"not-there": {}}}
    proof = collect(asked)
    assert proof["packages"]["pkg"]["root"] == str(tmp_path / "one")
    assert proof["distributions"]["not-there"] == {"version": None, "folder": None}
    stray = types.ModuleType("pkg.part")
    stray.__file__ = str(tmp_path / "two/pkg/part.py")
    monkeypatch.setitem(sys.modules, "pkg.part", stray)
    assert collect(asked)["packages"]["pkg"]["elsewhere"] == [stray.__file__]
    del wanted["pkg"]["root"]  # as of torch, which may be anywhere
    assert collect(asked)["packages"]["pkg"]["elsewhere"] == []


def engines_that_change(checkout: Path, file: str) -> set[str]:
    engines = ("single", "ddp", "fsdp2", "mfsdp")
    before = {engine: identity(engine, checkout) for engine in engines}
    (checkout / file).write_text("changed = 1\n")
    after = {engine: identity(engine, checkout) for engine in engines}
    return {engine for engine in engines if before[engine] != after[engine]}


ALL = {"single", "ddp", "fsdp2", "mfsdp"}


@pytest.mark.parametrize(
    ("file", "engines"),
    [
        ("mfsdp_core/runtime/hooks.py", {"mfsdp"}),
        ("mfsdp_core/runtime/new_file.py", {"mfsdp"}),
        ("bench/engines/ddp.py", {"ddp"}),
        ("bench/engines/mfsdp.py", {"mfsdp"}),
        ("bench/engines/stock.py", ALL),
        ("bench/loop.py", ALL),
        ("bench/worker/rank.py", ALL),
        ("bench/models/llama.py", ALL),
        ("bench/data/source.py", ALL),
        ("bench/meters/memory.py", ALL),
        ("bench/cli/main.py", set()),
        ("bench/store/atomic.py", set()),
        ("reports/build.py", set()),
    ],
)
def test_a_changed_file_changes_the_code_of_the_engines_that_run_it(
    checkout: Path, file: str, engines: set[str]
) -> None:
    assert engines_that_change(checkout, file) == engines


def test_a_file_that_moves_is_a_change(checkout: Path) -> None:
    before = identity("mfsdp", checkout)
    file = checkout / "mfsdp_core/runtime/hooks.py"
    file.rename(file.with_name("renamed.py"))
    assert identity("mfsdp", checkout) != before


def test_the_same_code_has_the_same_identity_wherever_it_lies(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "elsewhere"
    shutil.copytree(checkout, copy)
    assert identity("mfsdp", copy) == identity("mfsdp", checkout)


def test_another_version_of_torch_is_other_code(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity("ddp", checkout)
    monkeypatch.setattr("bench.launch.code.metadata.version", lambda _: "2.99.0")
    assert identity("ddp", checkout) != before


PACKAGE = {
    "root": "/arm",
    "sha256": "a",
    "elsewhere": [],
    "files": {"bench/loop.py": "1", "bench/same.py": "3"},
}

PROOF = {
    "packages": {"bench": PACKAGE},
    "distributions": {"tiny_engine": {"version": "1.0", "folder": "/arm/packages"}},
    "torch": "2.13.0",
    "python": "3.11.7",
}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"root": "/here"}, "bench is imported from /here, expected /arm"),
        ({"root": None}, "bench is imported from nowhere, expected /arm"),
        ({"elsewhere": ["/here/x.py"]}, "bench has loaded /here/x.py, expected all below /arm"),
        (
            {"sha256": "b", "files": {"bench/loop.py": "2", "bench/same.py": "3"}},
            f"bench has hash b, expected {combined(PACKAGE['files'])} (bench/loop.py changed)",
        ),
        ({"version": None}, "version of tiny_engine is None, expected 1.0"),
        ({"folder": "/other"}, "folder of tiny_engine is /other, expected /arm/packages"),
        ({"torch": "2.12.0"}, "torch is 2.12.0, expected 2.13.0"),
        ({"python": "3.12.1"}, "python is 3.12.1, expected 3.11.7"),
    ],
)
def test_what_a_rank_imports_otherwise_than_its_arm_is_a_difference(found, says: str) -> None:
    def changed(part: dict[str, Any]) -> dict[str, Any]:
        return {
            key: changed(value) if isinstance(value, dict) and key != "files" else value
            for key, value in {**part, **{k: v for k, v in found.items() if k in part}}.items()
        }

    assert differences(PROOF, PROOF) == []
    assert differences(PROOF, changed(PROOF)) == [says]
