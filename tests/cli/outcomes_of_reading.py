"""Scenarios of the verbs that show what a results folder holds."""

from __future__ import annotations

from outcome_scenarios import Row, World, scenario, scenarios

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


@scenario("show", "a truncated record")
def _(world: World) -> int:
    world.sweep()
    path = world.run_folder("mfsdp") / "steps.node0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    code = world.run("show", "mfsdp")
    assert "problem" in world.out
    return code


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


scenarios(
    "export",
    {
        "an unknown sweep or format, or a folder that cannot be written": (
            Row(("tow",), ran={}),
            Row(("--to", "xlsx"), ("'csv', 'json', 'parquet'",)),
            Row(("--out", "/proc/nowhere")),
        ),
    },
)


scenarios(
    "history",
    {
        "no run that has it": (Row(("step_time",), ran={"ddp": "crashed", "mfsdp": "crashed"}),),
        "an unknown metric, archive or policy, or a folder that cannot be written": (
            Row(("step_tiem",), ("step_time",), ran={}),
            Row(("loss", "--archive", "nothing.jsonl")),
            Row(("loss", "--policy", "nothing.yaml")),
            Row(("loss", "--out", "/proc/nowhere")),
        ),
    },
)


scenarios(
    "status",
    {
        "an unknown sweep": (
            Row(("tow",), ("no sweep 'tow'", "known sweeps: two"), ran={}),
            Row(("../..",), ("cannot be a folder name",)),
        ),
        "a folder that is not a results folder": (
            Row(("--results", "/dev"), ("not a results folder",)),
            Row(("--results", "absent"), ("not a results folder",)),
        ),
    },
)


scenarios(
    "show",
    {
        "a finished run": (Row(("mfsdp",), (" ok",), ran={}),),
        "a failed run": (Row(("mfsdp",), ("hang: as the test wants",), ran={"mfsdp": "hang"}),),
        "an unknown run": (Row(("fsdp9",), ("no run",), ran={}),),
        "an ambiguous part of an id": (Row(("debug",), ran={}),),
    },
)


scenarios(
    "logs",
    {
        "a rank without a log": (Row(("mfsdp", "--rank", 7), ran={}),),
        "an unknown run": (Row(("fsdp9",), ("no run",), ran={}),),
    },
)
