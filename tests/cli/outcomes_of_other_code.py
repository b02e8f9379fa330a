"""Outcomes of verbs on arms: they cannot be prepared, or what was measured is not what is asked."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from outcome_scenarios import (
    TWO_CELLS,
    Scenarios,
    World,
    ask,
    both,
    does,
    edited,
    ends,
    file,
    holds,
    ticking,
    wrong,
)
from outcomes_of_gates import ADVISORY
from recorded_runs import Arm

OTHER = "0123456789abcdef"
ROOT = Path(__file__).parents[2]
SAME = "sweep.yaml --arm base=. --arm head=."
ONE_CELL = "name: one\nbase: {engine.name: ddp}\n"
BY_SETTINGS = (
    f"{ONE_CELL}interleave: true\n"
    "arms:\n  a: {set: {train.lr: 0.01}}\n  b: {set: {train.lr: 0.02}}\n"
)
BLOCKS = "--interleave --repeat 1"
#: A/A of this checkout, measured.
MEASURED = (file(ONE_CELL), ask(f"run {SAME} {BLOCKS}"))
#: Of two sweeps of one name each verb takes its own, and running again repeats nothing.
TWICE = (*MEASURED, edited(head=OTHER), ask(f"run {SAME} {BLOCKS}"))
CHECKOUT = "sweep.yaml --arm base=. --arm head=checkout:head"
OLD_ID = "one-base-vs-head"


def has(count: int) -> object:
    return holds(lambda world: len(world.records) == count)


def run_before_ids_had_a_code(world: World) -> None:
    from bench.cli.run import RunVerb
    from bench.resolve.machine import Machine

    arms, results = ("base=.", "head=."), world.folder / "results"
    verb = RunVerb(
        sweep=world.file(ONE_CELL), repeat=1, arms=arms, interleave=True, results=results
    )
    sweep = replace(verb.select_arms(Machine.detect()), named_by_code=False)
    verb.run_selected(sweep, world.store)
    assert world.store.sweeps() == [OLD_ID]


def copy_of_the_code(world: World) -> None:
    for package in ("bench", "mfsdp_core"):
        shutil.copytree(ROOT / package, world.folder / "head" / package)


def edit_the_loop(world: World) -> None:
    with (world.folder / "head/bench/loop.py").open("a") as stream:
        stream.write("# edited\n")


def edit_what_no_rank_runs(world: World) -> None:
    shutil.copy(ROOT / "bench/loop.py", world.folder / "head/bench/loop.py")
    (world.folder / "head/bench/cli/app.py").write_text("")


def two_codes(world: World) -> bool:
    found = set(re.findall(r"\(code ([0-9a-f]{16})\)", world.err))
    return len(found) == 2 and world.out == ""


GATE: Scenarios = {
    "an arm whose ref is unknown": [
        *MEASURED,
        ask("gate sweep.yaml --arm base=. --arm head=no_such_ref", "no commit 'no_such_ref'"),
    ],
    "an arm that was measured with other code": [
        *MEASURED,
        edited(head=OTHER),
        ask(f"gate {SAME}", "one-base-vs-head-", " measured head at commit"),
        holds(two_codes),
    ],
    "a file whose arms were never measured": [
        *MEASURED,
        ask("gate sweep.yaml --arm base=. --arm other=.", "was never measured with", code=3),
        file(ONE_CELL.replace("one", "new")),
        ask(f"gate {SAME}"),
    ],
    "two comparisons whose arms have the same names": [
        *TWICE,
        holds(lambda w: all(w.store.read_plan(name)["id"] == name for name in w.store.sweeps())),
        ask(f"status {OLD_ID}"),
        holds(lambda w: len([name for name in w.store.sweeps() if name in w.out]) == 2),
        ask(f"gate {OLD_ID}", "2 sweeps are called one-base-vs-head", code=2),
        ask(f"gate {SAME}"),
        edited(),
        ask(f"run {SAME} {BLOCKS}", "2 of 2 runs finished (0 now, 2 before)"),
        has(4),
        ask(f"gate {SAME}"),
    ],
    "an old sweep whose id has no code hash": [
        does(run_before_ids_had_a_code),
        ask(f"gate {OLD_ID}"),
        edited(head=OTHER),
        ask(f"gate {SAME}", "one-base-vs-head measured head at", code=5),
        edited(),
        ask(f"gate {SAME}"),
    ],
    "a head that was edited since it was measured": [
        does(copy_of_the_code),
        file(ONE_CELL),
        ask(f"run {CHECKOUT} {BLOCKS}"),
        does(edit_what_no_rank_runs),
        ask(f"gate {CHECKOUT}"),
        does(edit_the_loop),
        ask(f"gate {CHECKOUT}", "measured head at"),
    ],
    "a head whose runs all failed, after another that was good": [
        *MEASURED,
        ends(base="crashed"),
        edited(head=OTHER),
        ask(f"run {SAME} {BLOCKS} --block-retries 0", code=3),
        ask(f"gate {SAME}", "crashed: as the test wants"),
    ],
    "settings in the file as arms, failing with new code": [
        file(BY_SETTINGS),
        ask(f"run sweep.yaml {BLOCKS}"),
        holds(lambda world: "are noise" not in world.err),
        ask("gate sweep.yaml"),
        ask("gate one"),
        edited(all=OTHER),
        ask("gate sweep.yaml", f"(code {OTHER})", code=5),
        ends(base="crashed"),
        ask(f"run sweep.yaml {BLOCKS} --block-retries 0", code=3),
        ask("gate sweep.yaml", code=3),
        ask("gate one"),  # by its id too: the plan says what counts
    ],
    "a budget for arms whose code has changed since they were measured": [
        ADVISORY,
        ticking(),
        file(BY_SETTINGS),
        ask("gate sweep.yaml --budget 5s --policy gates.yaml"),
        has(2),
        edited(all=OTHER),
        ask("gate sweep.yaml --budget 5s --policy gates.yaml"),
        has(4),
    ],
    "a sweep file that was changed since it ran": [
        *MEASURED,
        file(
            f"{ONE_CELL}overrides:\n  - {{when: {{engine.name: ddp}}, set: {{train.steps: 30}}}}\n"
        ),
        ask(f"gate {SAME}", "was measured with configuration"),
    ],
    "a cell that was added to the file since it ran": [
        file(TWO_CELLS.replace(", mfsdp", "")),
        ask(f"run {SAME} {BLOCKS}"),
        file(TWO_CELLS),
        ask(f"gate {SAME} --only ddp"),
        ask(f"gate {SAME}", "mfsdp failed (it was planned and has not run)"),
    ],
    "a baseline, and a file that was measured with other code": [
        file(ONE_CELL),
        ask("run sweep.yaml"),
        ask("baseline save main one"),
        ask("gate sweep.yaml --baseline main"),
        edited(all=OTHER),
        ends(base="crashed"),
        ask("run sweep.yaml", code=3),
        ask("gate sweep.yaml --baseline main", code=3),
        # The code of before is back: nothing is to be run again, and its runs count.
        edited(),
        ends(),
        ask("run sweep.yaml", "(0 now, 1 before)"),
        ask("gate sweep.yaml --baseline main"),
        file(ONE_CELL.replace("one", "two")),
        ask("run sweep.yaml"),
        edited(all=OTHER),
        ask("gate sweep.yaml --baseline main", "base was measured at"),
    ],
    "--arm with the id of a sweep": [
        both(Arm()),
        ask("gate gate --arm base=. --arm head=.", "--arm goes with a sweep file"),
    ],
}

COMPARE: Scenarios = {
    "the arms of one sweep": [
        both(Arm(slower=1.1)),
        ask("compare gate", "regressed"),  # says what it sees and judges nobody
    ],
    "an arm whose ref is unknown": [
        file(ONE_CELL),
        ask("compare sweep.yaml --arm base=. --arm head=no_such_ref"),
    ],
    "an arm that was measured with other code": [
        *MEASURED,
        edited(head=OTHER),
        ask(f"compare {SAME}"),
    ],
    "a file whose arms were never measured": [
        *MEASURED,
        ask("compare sweep.yaml --arm base=. --arm other=."),
    ],
    "two comparisons whose arms have the same names": [*TWICE, ask(f"compare {SAME}")],
    "--arm with the id of a sweep, or with two sides": [
        both(Arm()),
        file(ONE_CELL),
        *wrong("compare gate --arm base=. --arm head=."),
        ask("compare sweep.yaml gate --arm base=. --arm head=."),
    ],
}

PLAN: Scenarios = {
    "arms, on the command line or in the file": [
        file(TWO_CELLS),
        ask(f"plan {SAME}", "4 runs with all arms", "not interleaved"),
        file(f"{TWO_CELLS}arms: {{base: main, head: .}}\n"),
        ask("plan sweep.yaml"),
    ],
}

RUN: Scenarios = {
    "interleaved arms, all runs ok": [
        file(TWO_CELLS),
        ask(
            f"run {SAME} --interleave --repeat 2",
            "8 of 8 runs finished",
            "all arms run the same code",
        ),
        ask("status two-base-vs-head --json"),
    ],
    "blocks within a budget": [
        ticking(),
        file(TWO_CELLS),
        ask(f"run {SAME} --budget 1m", "blocks: 6 in 1 min"),
        holds(lambda w: f"{len(w.records)} of {len(w.records)} runs finished" in w.err),
        ask(f"run {SAME} --budget 1m --json", '"blocks"'),
    ],
    "blocks of three arms within a budget": [
        ticking(),
        file(ONE_CELL),
        ask(f"run {SAME} --arm third=. --budget 30s", "9 of 9 runs finished"),
    ],
    "a budget without its requirements": [
        file(TWO_CELLS),
        *wrong("run sweep.yaml --budget 5m", f"run {SAME} --budget 5m --policy gates.yaml"),
        *wrong(f"run {SAME} --budget 5m --repeat 3", f"run {SAME} --budget 5m --force"),
        ask(f"run {SAME} --budget soon"),
        holds(lambda w: "arm base: " not in w.err),  # preparing arms may take minutes
    ],
    "a cell of a budgeted sweep that fails": [
        ends(ddp="crashed"),
        ticking(),
        file(TWO_CELLS),
        ask(f"run {SAME} --budget 1m --block-retries 0", "ddp: block 0 lost"),
    ],
    "an interleaved block that was lost for good": [
        ends(ddp="crashed"),
        file(TWO_CELLS),
        ask(
            f"run {SAME} --interleave --block-retries 1",
            "block 0 lost, arm",
            "given up, and its cell with it",
        ),
    ],
    "an arm that cannot be prepared": [
        file(TWO_CELLS),
        *wrong("run sweep.yaml --arm base=. --arm head=checkout:missing"),
        ask("run sweep.yaml --arm base=. --arm head=python:/dev/null", "arm head: "),
        holds(lambda w: w.records == []),
    ],
    "arms that cannot be compared, or options that need arms": [
        file(TWO_CELLS),
        *wrong("run sweep.yaml --arm base=.", "run sweep.yaml --arm base=. --arm base=main"),
        ask("run sweep.yaml --interleave"),
    ],
}
