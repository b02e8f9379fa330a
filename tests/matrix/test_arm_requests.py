"""What an arm may be asked to be, on the command line and in a sweep file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.launch.arm.request import ArmRequest
from sweeps.arms import parse_arm_options
from sweeps.definition import load_sweep, parse_sweep
from sweeps.document import SweepFileError

MATRIX = "matrix:\n  product: {engine.name: [ddp, mfsdp]}\n"


def only(text: str) -> ArmRequest:
    return parse_arm_options([f"x={text}", "other=."])[0]


def test_a_bare_word_is_a_git_ref() -> None:
    base, head = parse_arm_options(["base=main", "head=v1.0~3"])
    assert (base.name, base.git, head.git) == ("base", "main", "v1.0~3")


def test_a_dot_is_the_working_tree_as_it_is() -> None:
    assert only(".") == ArmRequest("x")
    assert only("checkout:.") == ArmRequest("x")


def test_refs_with_slashes_and_equal_signs_are_refs() -> None:
    assert only("origin/feature=1").git == "origin/feature=1"


def test_keys_can_be_combined() -> None:
    arm = only("git:main,repo:/somewhere,python:python3.12,packages:torch==2.12.0,packages:numpy<3")
    assert (arm.git, arm.repo, arm.python) == ("main", Path("/somewhere"), Path("python3.12"))
    assert arm.packages == ("torch==2.12.0", "numpy<3")


def test_a_pin_may_hold_a_comma() -> None:
    assert only("packages:torch>=2.11,<2.12,python:python3").packages == ("torch>=2.11,<2.12",)


def test_relative_paths_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert only("checkout:there").checkout == tmp_path / "there"
    assert only("python:venv/bin/python").python == tmp_path / "venv/bin/python"


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["base=main"], "'base' is the only arm; a comparison needs two"),
        (["base=main", "base=."], "arm 'base' is given twice"),
        (["main", "head=."], "--arm main: expected NAME=WHAT"),
        (["base=", "head=."], "--arm base=: expected NAME=WHAT"),
        (["=main", "head=."], "expected a name of up to 24 letters"),
        (["a b=main", "head=."], "expected a name of up to 24 letters"),
        (["../x=main", "head=."], "expected a name of up to 24 letters"),
        (["base=chekout:x", "head=."], "unknown key 'chekout'; did you mean 'checkout'?"),
        (["base=git:a,checkout:b", "head=."], "git and checkout exclude each other"),
        (["base=repo:a", "head=."], "repo says where a git ref is looked up"),
        (["base=git:a,git:b", "head=."], "git is given twice"),
        (["base=git:a,b", "head=."], "expected KEY:VALUE, found 'b'"),
        (["base=git:", "head=."], "git: expected a text with something in it"),
        (["base=--upload-pack=x", "head=."], "would be read as an option"),
        (["base=packages:--index-url=x", "head=."], "would be read as an option"),
        ([f"a{n}=main" for n in range(9)], "9 arms; expected at most 8"),
    ],
)
def test_an_arm_that_cannot_be_meant_is_refused(arms: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_arm_options(arms)
    assert message in str(refused.value)


def test_a_sweep_file_names_its_arms_and_their_paths_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        f"name: a\n{MATRIX}interleave: true\narms:\n"
        "  base: main\n"
        "  head: .\n"
        "  other: {git: v1, repo: ../engine, packages: [numpy==2.0.0, ./tiny]}\n"
        "  last:\n"
    )
    (tmp_path / "tiny").mkdir()
    sweep = load_sweep(file)
    base, head, other, last = sweep.arms
    assert sweep.interleave is True
    assert (base.git, head) == ("main", ArmRequest("head"))
    assert other.repo == tmp_path / "../engine"
    assert other.packages == ("numpy==2.0.0", str(tmp_path / "tiny"))
    assert last == ArmRequest("last")


def test_a_sweep_file_without_arms_has_none() -> None:
    sweep = parse_sweep(f"name: a\n{MATRIX}")
    assert (sweep.arms, sweep.interleave) == ((), False)


@pytest.mark.parametrize(
    ("arms", "line", "message"),
    [
        ("arms: {base: main}", 4, "'base' is the only arm"),
        ("arms: [base, head]", 4, "arms: expected a mapping"),
        ("arms:\n  base: 3\n  head: .", 5, "expected a git ref, `.` or a mapping"),
        ("arms:\n  base: main\n  head: {gti: x}", 6, "unknown key 'gti'; did you mean 'git'?"),
        ("arms:\n  base: {packages: torch}\n  head: .", 5, "packages: expected a valid list"),
        ("arms:\n  base: {git: 3}\n  head: .", 5, "git: expected a valid string, found 3"),
        ("arms:\n  'a b': x\n  head: .", 5, "expected a name"),
        ("arms:\n  base: {git: }\n  head: .", 5, "git: expected a value, found none"),
        ("interleave: maybe", 4, "interleave: expected a valid boolean"),
    ],
)
def test_a_wrong_arm_is_refused_with_its_line(arms: str, line: int, message: str) -> None:
    with pytest.raises(SweepFileError) as refused:
        parse_sweep(f"name: a\n{MATRIX}{arms}\n", "a.yaml")
    assert f"a.yaml:{line}: " in str(refused.value)
    assert message in str(refused.value)


def test_a_description_holds_no_path() -> None:
    arm = only("checkout:/data/somebody/engine,python:/opt/x/python,packages:numpy==2.0.0")
    assert arm.described() == "checkout engine, its own interpreter, numpy==2.0.0"
    assert only("git:v1,repo:/data/somebody/engine").described() == "git v1 of engine"
    assert only(".").described() == "working tree"
