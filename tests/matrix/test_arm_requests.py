"""What an arm may be asked to be, on the command line and in a sweep file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_texts import parse_sweep

from bench.errors import UsageError
from bench.launch.arms import ArmRequest
from sweeps.arms import parse_arm_options
from sweeps.definition import load_sweep
from sweeps.document import SweepFileError

MATRIX = "matrix:\n  product: {engine.name: [ddp, mfsdp]}\n"


@pytest.mark.parametrize(
    ("text", "expected", "described"),
    [
        ("main", {"git": "main"}, "git main"),
        ("origin/feature=1", {"git": "origin/feature=1"}, "git origin/feature=1"),
        (".", {}, "working tree"),
        ("checkout:.", {}, "working tree"),
        # Keys can be combined, a pin may hold a comma, and a description holds no path.
        (
            "git:v1,repo:/data/engine,python:python3.12,packages:torch>=2.11,<2.12,packages:numpy<3",
            {
                "git": "v1",
                "repo": Path("/data/engine"),
                "python": Path("python3.12"),
                "packages": ("torch>=2.11,<2.12", "numpy<3"),
            },
            "git v1 of engine, its own interpreter, torch>=2.11,<2.12, numpy<3",
        ),
        (
            "checkout:/data/somebody/engine",
            {"checkout": Path("/data/somebody/engine")},
            "checkout engine",
        ),
        # Paths are relative to the current folder.
        ("checkout:there", {"checkout": Path.cwd() / "there"}, "checkout there"),
        (
            "python:venv/bin/python",
            {"python": Path.cwd() / "venv/bin/python"},
            "working tree, its own interpreter",
        ),
        (
            "set:engine.name=fsdp2,engine.strategy=optim_grads",
            {"settings": {"engine.name": "fsdp2", "engine.strategy": "optim_grads"}},
            "working tree, engine.name=fsdp2, engine.strategy=optim_grads",
        ),
        # A comma goes on with what is before it, whatever was named first.
        (
            "packages:torch<3,set:train.steps=5,packages:numpy>=1,<3",
            {"packages": ("torch<3", "numpy>=1,<3"), "settings": {"train.steps": 5}},
            "working tree, torch<3, numpy>=1,<3, train.steps=5",
        ),
    ],
)
def test_an_arm_of_the_command_line_is_read_and_described(text, expected, described) -> None:
    found, _ = parse_arm_options([f"x={text}", "other=."])
    assert found == ArmRequest("x", **expected)
    assert found.described() == described


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
        ("arms:\n  base: {set: {engine.nam: ddp}}\n  head: .", 5, "did you mean 'engine.name'"),
        ("arms:\n  base: {set: {engine.name: dpd}}\n  head: .", 5, "did you mean 'ddp'"),
        ("arms:\n  base: {set: [engine.name]}\n  head: .", 5, "set: expected a mapping"),
        ("arms:\n  base: {set: {}}\n  head: .", 5, "set: expected at least one"),
    ],
)
def test_a_wrong_arm_is_refused_with_its_line(arms: str, line: int, message: str) -> None:
    with pytest.raises(SweepFileError) as refused:
        parse_sweep(f"name: a\n{MATRIX}{arms}\n", "a.yaml")
    assert f"a.yaml:{line}: " in str(refused.value)
    assert message in str(refused.value)
