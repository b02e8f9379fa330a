"""Outcomes of `plan` and `run` with arms. Their ranks are stood in for; the arms are prepared."""

from __future__ import annotations

from outcome_scenarios import TWO_CELLS, World, scenario

SAME = ("--arm", "base=.", "--arm", "head=.")


@scenario("plan", "arms, on the command line or in the file")
def _(world: World) -> int:
    assert world.run("plan", world.file(TWO_CELLS), *SAME) == 0
    assert "4 runs with all arms" in world.out
    assert "not interleaved" in world.out
    return world.run("plan", world.file(f"{TWO_CELLS}arms: {{base: main, head: .}}\n"))


@scenario("run", "interleaved arms, all runs ok")
def _(world: World) -> int:
    asked = (*SAME, "--interleave", "--repeat", "2")
    code = world.run("run", world.file(TWO_CELLS), *asked)
    assert "8 of 8 runs finished" in world.err
    assert "all arms run the same code" in world.err
    assert world.run("status", "two-base-vs-head", "--json") == 0
    return code


@scenario("run", "blocks within a budget, until all is decided")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    asked = (*SAME, "--budget", "5m")
    code = world.run("run", file, *asked)
    assert "2 of 2 comparisons decided" in world.err
    blocks = len(list(world.store.records())) // 4
    assert f"{4 * blocks} of {4 * blocks} runs finished" in world.err
    assert world.run("run", file, *asked, "--json") == 0
    assert '"more_starts": 0.0' in world.out
    # Blocks of a fixed number that are added later do not undo that they were looked at.
    assert world.run("run", file, *SAME, "--interleave", "--repeat", "1") == 0
    (name,) = world.store.sweeps()
    assert world.store.read_plan(name)["until_decided"]
    return code


@scenario("run", "blocks of three arms within a budget")
def _(world: World) -> int:
    arms = (*SAME, "--arm", "third=.")
    code = world.run("run", world.file(TWO_CELLS), *arms, "--budget", "5m")
    assert "4 of 4 comparisons decided" in world.err
    assert "ddp, third: step_time equivalent" in world.err
    return code


@scenario("run", "a budget without its requirements")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    assert world.run("run", file, *SAME, "--policy", "gates.yaml") == 2
    for wrong in (("soon",), ("5m", "--policy", "gates.yaml")):
        assert world.run("run", file, *SAME, "--budget", *wrong) == 2
        assert "arm base: " not in world.err  # preparing arms may take minutes
    assert world.run("run", file, "--budget", "5m") == 2
    for wrong in (("--repeat", "3"), ("--force",)):
        asked = (*SAME, "--budget", "5m", *wrong)
        assert world.run("run", file, *asked) == 2
    return 2


@scenario("run", "a cell of a budgeted sweep that fails")
def _(world: World) -> int:
    world.states = {"ddp": "crashed"}
    asked = (*SAME, "--budget", "5m", "--block-retries", "0")
    code = world.run("run", world.file(TWO_CELLS), *asked)
    assert "ddp: block 0 lost" in world.err
    assert "mfsdp: step_time equivalent" in world.err
    return code


@scenario("run", "an interleaved block that was lost for good")
def _(world: World) -> int:
    world.states = {"ddp": "crashed"}
    code = world.run("run", world.file(TWO_CELLS), *SAME, "--interleave", "--block-retries", "1")
    assert "block 0 lost, arm" in world.err
    assert "given up, and its cell with it" in world.err
    return code


@scenario("run", "an arm that cannot be prepared")
def _(world: World) -> int:
    for wrong in ("head=no-such-ref", "head=checkout:missing", "head=python:/dev/null"):
        assert world.run("run", world.file(TWO_CELLS), "--arm", "base=.", "--arm", wrong) == 2
        assert "arm head: " in world.err
        assert list(world.store.records()) == []
    return 2


@scenario("run", "arms that cannot be compared, or options that need arms")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    assert world.run("run", file, "--arm", "base=.") == 2
    assert world.run("run", file, "--arm", "base=.", "--arm", "base=main") == 2
    return world.run("run", file, "--interleave")
