"""Arms before anything runs: worktrees, packages, interpreters, and every refusal. No rank."""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest
from git_repository import git
from small_runs import small_run

from bench.errors import UsageError
from bench.launch.arms import ArmRequest, prepare_arms
from bench.launch.code import RankCode, checkout_root, code_identity
from bench.launch.code_proof import expected_code
from bench.launch.probe import unknown_settings

CELLS = {name: small_run(name) for name in ("mfsdp", "fsdp2")}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of this checkout as a repository of two commits; the second changes the core."""
    root = tmp_path_factory.mktemp("template") / "project"
    skip = shutil.ignore_patterns("__pycache__")
    for package in ("bench", "mfsdp_core"):
        shutil.copytree(checkout_root() / package, root / package, ignore=skip)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    git(root, "tag", "first")
    core = root / "mfsdp_core" / "errors.py"
    core.write_text(core.read_text() + "\nCHANGED = 1\n")
    git(root, "commit", "-q", "-a", "-m", "second")
    return root


@pytest.fixture
def repository(tmp_path: Path, template: Path) -> Path:
    return shutil.copytree(template, tmp_path / "project")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "results" / "arms"


def prepared(cache: Path, **request) -> RankCode:
    return prepare_arms([ArmRequest("x", **request)], {"x": CELLS}, cache)[0]


def refusal(cache: Path, **request) -> str:
    with pytest.raises(UsageError) as refused:
        prepared(cache, **request)
    return str(refused.value)


def test_the_working_tree_is_this_checkout_with_this_interpreter(cache: Path) -> None:
    arm = prepared(cache)
    assert (arm.root, arm.python, arm.paths) == (checkout_root(), sys.executable, ())
    for resolved in CELLS.values():
        assert code_identity(resolved, code=arm) == code_identity(resolved)


def test_a_ref_becomes_a_clean_worktree_of_its_commit_that_is_used_again(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")  # as a hook of git has it
    (repository / "mfsdp_core" / "errors.py").write_text("raise SystemExit('not committed')\n")
    arm = prepared(cache, git="first", repo=repository)
    root, commit = arm.root, git(repository, "rev-parse", "first")
    assert (arm.pinned.commit, arm.pinned.dirty_hash) == (commit, None)
    assert root.is_relative_to(cache)
    assert "CHANGED" not in (root / "mfsdp_core" / "errors.py").read_text()
    assert "not committed" in (repository / "mfsdp_core" / "errors.py").read_text()

    born = root.stat().st_ino
    (root / "bench" / "__pycache__").mkdir(exist_ok=True)
    (root / "bench" / "__pycache__" / "spec.cpython-311.pyc").write_bytes(b"")  # is no change
    assert prepared(cache, git=commit[:9], repo=repository).root == root
    assert root.stat().st_ino == born
    assert len(git(repository, "worktree", "list").splitlines()) == 2

    (root / "bench" / "models" / "added.py").write_text("pass\n")
    assert "has changes (?? bench/models/added.py)" in refusal(cache, git="first", repo=repository)
    (root / "bench" / "models" / "added.py").unlink()
    (root / "mfsdp_core" / "errors.py").write_text("pass\n")
    message = refusal(cache, git="first", repo=repository)
    assert "has changes (M mfsdp_core/errors.py)" in message
    assert "Remove that folder" in message

    shutil.rmtree(cache)
    assert prepared(cache, git="first", repo=repository).root == root
    assert git(repository, "worktree", "list").count("\n") == 1


def test_a_changed_core_changes_the_code_of_mfsdp_cells_alone(
    cache: Path, repository: Path
) -> None:
    first, second = (prepared(cache, git=ref, repo=repository) for ref in ("first", "main"))
    same = {
        name: code_identity(run, code=first) == code_identity(run, code=second)
        for name, run in CELLS.items()
    }
    assert same == {"mfsdp": False, "fsdp2": True}


def test_a_project_in_a_folder_of_a_larger_repository_is_found(
    cache: Path, repository: Path
) -> None:
    (repository / "inner").mkdir()
    for package in ("bench", "mfsdp_core"):
        git(repository, "mv", package, f"inner/{package}")
    git(repository, "commit", "-q", "-m", "moved")
    root = prepared(cache, git="main", repo=repository / "inner").root
    assert root.name == "inner"
    assert prepared(cache, git="main", repo=repository / "inner").root == root
    assert "has no folder inner" in refusal(cache, git="first", repo=repository / "inner")


def test_a_checkout_is_taken_as_it_is_and_pinned(cache: Path, repository: Path) -> None:
    run = CELLS["mfsdp"]
    clean = prepared(cache, checkout=repository)
    before = code_identity(run, code=clean)
    (repository / "mfsdp_core" / "errors.py").write_text("pass\n")
    assert code_identity(run, code=clean) == before  # it does not follow later edits
    dirty = prepared(cache, checkout=repository)
    assert (clean.pinned.dirty_hash, dirty.pinned.commit) == (None, clean.pinned.commit)
    assert dirty.pinned.dirty_hash is not None
    assert code_identity(run, code=dirty) != before


def test_unknown_refs_and_places_are_refused(cache: Path, repository: Path, tmp_path: Path) -> None:
    assert "knows no commit 'nowhere'" in refusal(cache, git="nowhere", repo=repository)
    (tmp_path / "plain").mkdir()
    assert "is not in a git repository" in refusal(cache, git="main", repo=tmp_path / "plain")
    assert "is not a folder" in refusal(cache, git="main", repo=tmp_path / "missing")
    assert "there is no folder" in refusal(cache, checkout=tmp_path / "missing")
    assert "holds no Python package" in refusal(cache, checkout=tmp_path / "plain")
    assert "is no program that can be run" in refusal(cache, python=tmp_path / "python")


def test_every_arm_is_looked_at_before_the_first_is_made(cache: Path, repository: Path) -> None:
    requests = [ArmRequest("a", git="first", repo=repository), ArmRequest("b", git="nowhere")]
    with pytest.raises(UsageError, match="arm b: git knows no commit"):
        prepare_arms(requests, {arm.name: CELLS for arm in requests}, cache)
    assert not cache.exists()


def test_a_commit_that_cannot_run_ranks_is_refused(cache: Path, repository: Path) -> None:
    git(repository, "rm", "-q", "-r", "bench/launch")
    git(repository, "commit", "-q", "-m", "without")
    assert "it has no launch/agent.py" in refusal(cache, git="main", repo=repository)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "bench/record.py", "SCHEMA_VERSION = 1", "SCHEMA_VERSION = 99",
            "writes records of schema 99, this one reads schema 1",
        ),
        ("bench/spec/names.py", "", "raise RuntimeError('half a merge')\n",
         "RuntimeError: half a merge"),
        (
            "bench/engines/fsdp2.py", None, None,
            "arm x: its bench has no engine fsdp2, which cell fsdp2 needs; choose a later commit,"
            " or leave the cell out with --skip",
        ),
    ],
)  # fmt: skip
def test_a_bench_that_cannot_run_a_cell_or_write_its_record_is_refused(
    cache: Path, repository: Path, file: str, old: str | None, new: str | None, said: str
) -> None:
    source = repository / file
    if old is None:
        source.unlink()
    else:
        source.write_text(source.read_text().replace(old, new) if old else new)
    assert said in refusal(cache, checkout=repository)


def test_a_setting_that_came_later_is_left_out_while_it_has_its_default(
    cache: Path, repository: Path
) -> None:
    spec = repository / "bench" / "spec" / "engine_table.py"
    lines = spec.read_text().splitlines(keepends=True)
    spec.write_text("".join(line for line in lines if "double_buffer" not in line))
    arm = prepared(cache, checkout=repository)
    assert arm.unknown_settings == {("engine", "double_buffer")}


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        ("double_buffer", "extra_forbidden", "cannot run cell c: engine.double_buffer = True: no"),
        ("allocator", "literal_error", "cell c: engine.allocator = 'storage_resize': no"),
    ],
)
def test_a_setting_that_an_arm_cannot_run_as_it_is_meant_is_refused(place, kind, said) -> None:
    engine = CELLS["mfsdp"].engine.with_settings(double_buffer=True)
    cells = {"c": CELLS["mfsdp"].model_copy(update={"engine": engine})}
    with pytest.raises(UsageError, match="arm base: its bench") as refused:
        unknown_settings({"c": [[["engine", place], kind, "no"]]}, cells, "arm base")
    assert said in str(refused.value)


def test_an_interpreter_without_torch_is_refused(cache: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    message = refusal(cache, python=tmp_path / "empty" / "bin" / "python")
    assert "has no torch, pydantic, psutil, numpy" in message


def test_a_program_that_is_no_interpreter_is_refused(cache: Path) -> None:
    assert "/bin/true" in refusal(cache, python=Path("/bin/true"))


def test_another_interpreter_with_what_ranks_need_is_used(cache: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join(ours))
    arm = prepared(cache, python=tmp_path / "other" / "bin" / "python")
    assert arm.python == str(tmp_path / "other" / "bin" / "python")
    assert arm.versions() == prepared(cache).versions()


def fake_torch(make_wheel, folder: Path, version: str) -> Path:
    files = {
        "torch/__init__.py": "raise ImportError('this torch is only looked at')\n",
        "torch/version.py": f"__version__ = '{version}'\n",
        "torch/distributed/fsdp/api.py": f"VERSION = '{version}'\n",
    }
    return make_wheel(folder, "torch", version, files)


@pytest.mark.nightly
def test_two_versions_of_torch_are_two_arms(cache: Path, tmp_path: Path, make_wheel) -> None:
    wheels = [fake_torch(make_wheel, tmp_path / "wheels", version) for version in ("98.0", "99.0")]
    requests = [ArmRequest(f"torch{n}", packages=(str(w),)) for n, w in enumerate(wheels)]
    old, new = prepare_arms(requests, {arm.name: CELLS for arm in requests}, cache)
    assert [arm.versions()[0] for arm in (old, new)] == ["98.0", "99.0"]
    assert [arm.pinned.distributions["torch"]["version"] for arm in (old, new)] == [
        "98.0",
        "99.0",
    ]
    codes = [code_identity(CELLS["fsdp2"], code=arm) for arm in (old, new)]
    assert len({*codes, code_identity(CELLS["fsdp2"])}) == 3
    wanted = expected_code(CELLS["fsdp2"], new, ())
    assert wanted["torch"] == "99.0"
    assert wanted["distributions"]["torch"]["folder"] == str(new.paths[0])


def test_packages_are_installed_once_until_they_change(
    cache: Path, tmp_path: Path, make_wheel
) -> None:
    files = {"tiny_engine.py": "VALUE = 1\n"}
    pin = str(make_wheel(tmp_path / "wheels", "tiny_engine", "1.0", files))
    folder = prepared(cache, packages=(pin,)).paths[0]
    assert (folder / "tiny_engine.py").read_text() == "VALUE = 1\n"
    born = folder.stat().st_ino
    assert prepared(cache, packages=(pin,)).paths[0].stat().st_ino == born
    make_wheel(tmp_path / "wheels", "tiny_engine", "1.0", {"tiny_engine.py": "VALUE = 2\n"})
    again = prepared(cache, packages=(pin,)).paths[0]
    assert (again / "tiny_engine.py").read_text() == "VALUE = 2\n"


def test_a_package_that_cannot_be_installed_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.whl").write_text("no wheel")
    assert "pip could not install" in refusal(cache, packages=(str(tmp_path / "broken.whl"),))
    assert list((cache / "packages").iterdir()) == []


def test_an_engine_of_another_repository_is_put_first_and_hashed(
    cache: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine" / "src" / "their_engine"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text("VALUE = 1\n")
    first = prepared(cache, checkout=tmp_path / "engine")
    assert (first.root, first.paths) == (checkout_root(), (tmp_path / "engine" / "src",))
    (engine / "__init__.py").write_text("VALUE = 2\n")
    second = prepared(cache, checkout=tmp_path / "engine")
    run = CELLS["fsdp2"]
    assert code_identity(run, code=first) != code_identity(run, code=second)
    json.dumps(expected_code(run, second, ()))


def test_the_probe_looks_at_the_arm_and_not_at_the_current_folder(
    cache: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "bench").mkdir(parents=True)
    (tmp_path / "here" / "bench" / "__init__.py").write_text("raise SystemExit('wrong')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(checkout_root()), str(tmp_path / "here")])
    )
    assert prepared(cache, git="first", repo=repository).root.is_relative_to(cache)
