"""Outcomes of `import`, and of `compare` on what was imported."""

from __future__ import annotations

import json

import zstandard
from outcome_scenarios import World, scenario

from bench.workload import ImportedStep, Provenance, Workload


@scenario("compare", "an imported and a measured run")
def _(world: World) -> int:
    world.sweep()
    theirs = Workload(framework="megatron-lm", ranks=64)
    log = Provenance(kind="imported", source="train.log", importer="megatron 1", absent=("loss",))
    run = world.store.imports.write("theirs", theirs, log, [ImportedStep(1, milliseconds=812.5)])
    code = world.run("compare", "two", run.id)
    assert "megatron 1: train.log" in world.out
    assert f"{run.id} does not say: loss" in world.out
    return code


@scenario("compare", "two imported runs")
def _(world: World) -> int:
    for name, loss in (("base", 2.5), ("head", 2.25)):
        (world.folder / f"{name}.csv").write_text(f"step,loss\n7,{loss}\n")
        assert world.run("import", world.folder / f"{name}.csv") == 0
    code = world.run("compare", "base", "head", "--format", "md")
    assert "-2.5e-01 (step 7)" in world.out
    assert "base, head do not say: step times" in world.out
    return code


@scenario("compare", "--ignore without HEAD, or --ignore or --policy with an imported run")
def _(world: World) -> int:
    world.sweep()
    (world.folder / "a.csv").write_text("step,loss\n1,2.5\n")
    (world.folder / "gates.yaml").write_text("metrics: {step_time: {gate: advisory}}\n")
    assert world.run("import", world.folder / "a.csv") == 0
    assert world.run("compare", "two", "--ignore", "dtypes") == 2
    assert "name HEAD, or leave --ignore out" in world.err
    assert world.run("compare", "two", "a", "--ignore", "dtypes") == 2
    assert "beside the imported run a there are none" in world.err
    return world.run("compare", "a", "two", "--policy", world.folder / "gates.yaml")


@scenario("import", "a log with steps")
def _(world: World) -> int:
    (world.folder / "a.csv").write_text("step,loss\n1,2.5\n")
    code = world.run("import", world.folder / "a.csv", "--set", "ranks=8")
    assert "a does not say: step times" in world.out
    return code


@scenario("import", "the same log again")
def _(world: World) -> int:
    (world.folder / "a.csv").write_text("step,loss\n1,2.5\n")
    assert world.run("import", world.folder / "a.csv") == 0
    return world.run("import", world.folder / "a.csv")


@scenario("import", "a list of imports")
def _(world: World) -> int:
    world.sweep()
    return world.run("import")


@scenario("import", "a log without any training step")
def _(world: World) -> int:
    (world.folder / "a.log").write_text("hello\n")
    code = world.run("import", world.folder / "a.log")
    assert "a.log holds no run" in world.err
    return code


_PAGE = """\
# base (fp32)
iteration 100/ 500 | elapsed time per iteration (ms): 5.0 | lm loss: 2.0 |
# head (bf16)
iteration 100/ 500 | elapsed time per iteration (ms): -4.0 | lm loss: 2.0 |
"""


@scenario("import", "several labelled runs in one text")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_PAGE)
    code = world.run("import", world.folder / "page.txt", "--json")
    base, head = json.loads(world.out)["imports"]
    assert (base["name"], head["label"]) == ("page.base", "head (bf16)")
    assert head["remarks"] == ["1 values that cannot be were dropped: milliseconds -4 (line 4)"]
    return code


@scenario("import", "a folder or compressed files, some without a run")
def _(world: World) -> int:
    logs = world.folder / "logs"
    logs.mkdir()
    (logs / "a.txt").write_text("hello\n")
    (logs / "b c (1).log.zst").write_bytes(zstandard.compress(_PAGE.encode()))
    code = world.run("import", logs)
    assert "a.txt holds no run" in world.err
    assert "b-c-1.base" in world.out
    return code


@scenario("report", "only imported runs")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_PAGE)
    assert world.run("import", world.folder / "page.txt") == 0
    return world.run("report")


@scenario("import", "a missing file, a taken name, or an invalid fact")
def _(world: World) -> int:
    log = world.folder / "a.csv"
    assert world.run("import", log) == 2
    log.write_text("step,loss\n1,2.5\n")
    assert world.run("import", log, "--set", "rank=8") == 2
    assert world.run("import", log, "--name", "../b") == 2
    assert world.run("import", log) == 0
    log.write_text("step,loss\n1,2.75\n")
    code = world.run("import", log)
    assert "a is already the name of an import" in world.err
    return code


_EVIDENCE = """\
# base
iteration 100/ 500 | elapsed time per iteration (ms): 5.0 | lm loss: 2.0 |
# head
iteration 100/ 500 | elapsed time per iteration (ms): 4.0 | lm loss: 2.0 |
"""


@scenario("lint", "findings")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_EVIDENCE)
    for form in ("md", "github"):
        assert world.run("lint", world.folder / "page.txt", "--format", form) == 1
        assert "single_run" in world.out
    code = world.run("lint", world.folder / "page.txt", "--json")
    assert {one["rule"] for one in json.loads(world.out)["findings"]} == {
        "single_run", "unstated_configuration",
    }  # fmt: skip
    return code


@scenario("lint", "every finding silenced with a reason")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_EVIDENCE)
    silences = ("--ignore", "single_run=why", "--ignore", "unstated_configuration=why")
    return world.run("lint", world.folder / "page.txt", *silences)


@scenario("lint", "a text without a run")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text("hello\n")
    return world.run("lint", world.folder / "page.txt")


@scenario("lint", "two imported runs")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_EVIDENCE)
    assert world.run("import", world.folder / "page.txt") == 0
    code = world.run("lint", "page.base", "page.head")
    assert "n = 1, no interval: time -20.00 %" in world.out
    return code


@scenario("lint", "an unknown rule, format or run, or a silence without a reason")
def _(world: World) -> int:
    (world.folder / "page.txt").write_text(_EVIDENCE)
    page = world.folder / "page.txt"
    assert world.run("lint", page, "--ignore", "no_such_rule=why") == 2
    assert world.run("lint", page, "--ignore", "single_run") == 2
    assert world.run("lint", page, "--format", "html") == 2
    world.sweep()
    return world.run("lint", "no-such-run")


@scenario("report", "a pull-request block, or a matrix")
def _(world: World) -> int:
    world.sweep()
    (world.folder / "page.txt").write_text(_EVIDENCE)
    assert world.run("import", world.folder / "page.txt") == 0
    code = world.run("report", "--format", "pr")
    assert "**Reproduce**" in world.out
    assert world.run("report", "two", "--format", "matrix", "--out", world.folder) == code
    assert (world.folder / "matrix.md").is_file()
    return code


@scenario("report", "an empty block")
def _(world: World) -> int:
    world.sweep(ddp="crashed", mfsdp="crashed")
    return world.run("report", "--format", "pr")


@scenario("report", "an unknown format")
def _(world: World) -> int:
    world.sweep()
    return world.run("report", "--format", "pdf")
