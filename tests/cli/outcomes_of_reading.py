"""Scenarios of the verbs that show what a results folder holds."""

from __future__ import annotations

import re

from outcome_scenarios import World, scenario

# -- export ------------------------------------------------------------------------------------


@scenario("export", "runs of any state")
def _(world: World) -> int:
    world.sweep(ddp="crashed")
    assert world.run("export", "two", "--out", "tables") == 0
    assert (world.folder / "tables" / "steps.csv").read_text().count("\n") > 1
    (world.run_folder("ddp") / "spec.json").write_text("{")
    code = world.run("export")
    assert "spec.json" in world.err
    return code


@scenario("export", "no run")
def _(world: World) -> int:
    assert world.store
    return world.run("export")


@scenario("export", "an unknown sweep or format, or a folder that cannot be written")
def _(world: World) -> int:
    world.sweep()
    assert world.run("export", "tow") == 2
    assert world.run("export", "--to", "xlsx") == 2
    return world.run("export", "--out", "/proc/nowhere")


# -- history -----------------------------------------------------------------------------------


@scenario("history", "runs that have the metric")
def _(world: World) -> int:
    world.sweep(ddp="crashed")
    assert world.run("history", "loss", "--append", "kept.jsonl", "--out", "page") == 0
    assert (world.folder / "kept.jsonl").read_text().count("\n") == 1
    assert "<svg" in (world.folder / "page" / "report.html").read_text()
    # Once more: nothing is added, and the file alone is enough.
    assert world.run("history", "loss", "--append", "kept.jsonl") == 0
    assert (world.folder / "kept.jsonl").read_text().count("\n") == 1
    code = world.run("history", "loss", "--results", "none", "--archive", "kept.jsonl")
    assert "1 point" in world.out
    return code


@scenario("history", "no run that has it")
def _(world: World) -> int:
    world.sweep(ddp="crashed", mfsdp="crashed")
    return world.run("history", "step_time")


@scenario("history", "an unknown metric, archive or policy, or a folder that cannot be written")
def _(world: World) -> int:
    world.sweep()
    assert world.run("history", "step_tiem") == 2
    assert "step_time" in world.err
    assert world.run("history", "loss", "--archive", "nothing.jsonl") == 2
    assert world.run("history", "loss", "--policy", "nothing.yaml") == 2
    return world.run("history", "loss", "--out", "/proc/nowhere")


# -- status, show, logs ------------------------------------------------------------------------


@scenario("status", "any state of the runs")
def _(world: World) -> int:
    world.sweep(ddp="crashed")
    assert world.run("status") == 0
    assert "crashed 1, ok 1" in world.out
    return world.run("status", "two")


@scenario("status", "a damaged record")
def _(world: World) -> int:
    world.sweep()
    (world.run_folder("ddp") / "spec.json").write_text("{")
    code = world.run("status", "two")
    assert "missing" in world.out
    assert "cannot be read" in world.err
    return code


@scenario("status", "an unknown sweep")
def _(world: World) -> int:
    world.sweep()
    return world.run("status", "tow")


@scenario("status", "a results folder that is not one")
def _(world: World) -> int:
    return world.run("status", "--results", "/dev")


@scenario("show", "a finished run")
def _(world: World) -> int:
    world.sweep()
    code = world.run("show", "mfsdp")
    assert re.search(r"state +ok", world.out)
    return code


@scenario("show", "a failed run")
def _(world: World) -> int:
    world.sweep(mfsdp="hang")
    code = world.run("show", "mfsdp")
    assert "hang: as the test wants" in world.out
    return code


@scenario("show", "a truncated record")
def _(world: World) -> int:
    world.sweep()
    path = world.run_folder("mfsdp") / "steps.node0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    code = world.run("show", "mfsdp")
    assert "problem" in world.out
    return code


@scenario("show", "an unknown run")
def _(world: World) -> int:
    world.sweep()
    return world.run("show", "fsdp9")


@scenario("show", "a part of an id that several runs have")
def _(world: World) -> int:
    world.sweep()
    return world.run("show", "debug")


@scenario("show", "a run without a readable spec")
def _(world: World) -> int:
    world.sweep()
    (world.run_folder("mfsdp") / "spec.json").unlink()
    return world.run("show", "mfsdp")


@scenario("logs", "a finished run")
def _(world: World) -> int:
    world.sweep()
    code = world.run("logs", "mfsdp", "--rank", 1)
    assert world.out == "I am rank 1\n"
    assert world.run("logs", "mfsdp") == 0
    assert world.out.index("I am rank 0") < world.out.index("I am rank 1")
    return code


@scenario("logs", "a rank that has no log")
def _(world: World) -> int:
    world.sweep()
    return world.run("logs", "mfsdp", "--rank", 7)


@scenario("logs", "an unknown run")
def _(world: World) -> int:
    world.sweep()
    return world.run("logs", "fsdp9")
