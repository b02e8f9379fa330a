"""Outcomes of `gate` and `baseline`. No rank is started."""

from __future__ import annotations

import re
from collections import Counter

from outcome_scenarios import (
    ONE,
    OTHER_MACHINE,
    TWO_CELLS,
    Scenarios,
    World,
    ask,
    both,
    does,
    ends,
    file,
    holds,
    recorded,
    swept,
    ticking,
    times,
    wrong,
)
from recorded_runs import CELLS, Arm

ARMS = "sweep.yaml --arm base=. --arm head=."
DDP = {"ddp": CELLS["ddp"]}
ADVISORY = file("metrics: {step_time: {gate: advisory}}\n", "gates.yaml")
ALL_CRASHED = dict.fromkeys(range(8), "crashed")
#: The head is slower, and the base as fast as it is.
SLOWER = times(lambda arm, _: 11.0 if arm == "head" else 10.0)
EQUAL = times(lambda *_: 10.0)
UNSTEADY = times(lambda *_: 10.0, noise=0.2)
ONE_CELL = file("name: gate\n")


def newer_schema(world: World) -> None:
    path = world.store.baselines.path("main")
    path.write_text(re.sub(r'("baseline_version": )\d+', r"\g<1>99", path.read_text()))


def first_line_blames(world: World) -> bool:
    """The first line is what a person reads in a CI log: it names who is to blame."""
    first = world.out.splitlines()[0]
    failed = "zero3 failed (no complete block (head: hang: as the test wants))"
    return failed in first and "ddp regressed: step_time +20." in first


def planned_what_has_run(world: World) -> bool:
    plan = world.store.read_plan(world.store.sweeps()[0])
    repeats = sum(cell["repeats"] for cell in plan["cells"])
    return repeats * 2 == len(world.records)


def ran(**runs: int) -> object:
    return holds(lambda world: Counter(record.status.cell for record in world.records) == runs)


GATE: Scenarios = {
    "every required metric equal or better": [
        both(Arm(slower=0.9), cells=CELLS),
        ask("gate gate --strict", "PASSED", "improved"),
    ],
    "a required metric regressed": [
        both(Arm(slower=1.1), sweep="slow"),
        ask("gate slow", "REGRESSED: 1 regressed", code=1),
        both(Arm(more_memory=1.02), sweep="large"),
        ask("gate large", "REGRESSED: 1 regressed", code=1),
        both(Arm(loss_shift=1e-3), sweep="other"),
        ask("gate other", "REGRESSED: 1 regressed", code=1),
        both(Arm(more_bytes=1.001), blocks=1),
        ask("gate gate"),  # counted bytes gate with one run a side
    ],
    "only an advisory metric regressed": [
        both(Arm(slower=1.1)),
        ADVISORY,
        ask("gate gate --policy gates.yaml --strict", "regressed (advisory)"),
    ],
    "undecided": [
        both(Arm(slower=1.5), blocks=3),
        ask("gate gate", "cannot decide with 3 blocks", "at least 6 blocks", "(--strict makes"),
    ],
    "undecided, with --strict": [both(Arm(), blocks=3), ask("gate gate --strict")],
    "a cell failed, even if another regressed": [
        both(Arm(slower=1.2, states=ALL_CRASHED)),
        ask("gate gate", "head: crashed: as the test wants", code=3),
        both(Arm(slower=1.2), sweep="mixed", cells=DDP),
        both(Arm(states=dict.fromkeys(range(8), "hang")), sweep="mixed"),
        ask("gate mixed", "FAILED TO MEASURE: 1 regressed"),
        holds(first_line_blames),
    ],
    "nothing was measured": [
        swept(ddp="crashed", mfsdp="crashed"),
        recorded("good"),
        ask("baseline save main good"),
        ask("gate two --baseline main"),
    ],
    "a required metric was not measured": [
        both(Arm(states=dict.fromkeys(range(8), "unstable"), steady=False)),
        ask("gate gate", "no steady time to compare"),
    ],
    "the baseline of another machine": [
        recorded("there", Arm(hardware=OTHER_MACHINE)),
        recorded("here"),
        ask("baseline save main there"),
        ask("gate here --baseline main", "hardware differs: Another CPU, 64 cores"),
    ],
    "a baseline of other configurations or of another schema": [
        recorded("one"),
        recorded("other", cells=DDP),
        ask("baseline save main one"),
        ask("gate other --baseline main", "not comparable: ", code=5),
        does(newer_schema),
        ask("gate one --baseline results/baselines/main.json"),
    ],
    "a regression, and cells that cannot be compared": [
        recorded("before", noise=0.003),
        recorded("after", Arm(slower=1.3), noise=0.003, cells=CELLS),
        ask("gate after --against before", "not comparable: ddp", "were not interleaved"),
    ],
    "a regression that more blocks confirm": [
        SLOWER,
        file("name: gate\nmatrix: {product: {engine.strategy: [no_shard, optim]}}\n"),
        ask(f"run {ARMS} --interleave --repeat 6"),
        ask(
            f"gate {ARMS} --only optim --confirm 2",
            "running 2 more blocks of 1 of 2 cells",
            "8 blocks",
        ),
        ran(no_shard=12, optim=16),
    ],
    "a regression that more blocks do not confirm": [
        times(lambda arm, block: 11.0 if arm == "head" and block < 6 else 10.0),
        ONE_CELL,
        ask(f"run {ARMS} --interleave --repeat 6"),
        ask(f"gate {ARMS}", code=1),
        ask(f"gate {ARMS} --confirm 6"),
    ],
    "blocks within a budget, of a change": [
        SLOWER,
        ticking(),
        file(TWO_CELLS),
        ask(f"gate {ARMS} --budget 3m", "blocks: 18 in 3 min", "2 regressed", code=1),
        holds(planned_what_has_run),
        ask(f"gate {ARMS}"),
    ],
    "one of two cells within a budget": [
        SLOWER,
        ticking(),
        file(TWO_CELLS),
        ask(f"gate {ARMS} --budget 2m --only 'dd*'"),
        holds(lambda world: {record.status.cell for record in world.records} == {"ddp"}),
    ],
    "blocks within a budget, of code that does not differ": [
        EQUAL,
        ticking(),
        file(TWO_CELLS),
        ask(f"gate {ARMS} --budget 3m --strict", "PASSED"),
        # A new budget goes on where the first stopped.
        ask(f"gate {ARMS} --budget 1m --json", '"budget"'),
        holds(planned_what_has_run),
    ],
    "a budget that ends before a decision": [
        UNSTEADY,
        ticking(),
        ONE_CELL,
        ask(f"gate {ARMS} --budget 1s --strict", "blocks: 1 in", "cannot decide with 1 block"),
    ],
    "an invalid budget": [
        both(Arm()),
        file(TWO_CELLS),
        ask(f"gate {ARMS} --budget soon", "expected a time such as 10m", code=2),
        ask("gate gate --budget 10m", "needs the sweep file", code=2),
        ask("gate sweep.yaml --budget 2m", "budgets need arms", "--arm base=main", code=2),
        ask(f"gate {ARMS} --budget 10m --confirm 2"),
    ],
    "an invalid policy file": [
        both(Arm()),
        file("metrics:\n  step_time: {tolerance: a bit}\n  speed: {}\n", "gates.yaml"),
        ask(
            "gate gate --policy gates.yaml",
            "gates.yaml:2: tolerance: expected a percentage",
            "gates.yaml:3: unknown key 'speed'",
        ),
    ],
    "an unknown sweep, baseline or arm, or options that exclude each other": [
        both(Arm()),
        ask("gate gaet", "did you mean 'gate'", code=2),
        *wrong(
            "gate gate --head haed",
            "gate gate --baseline main --head head",
            "gate gate --baseline main --confirm 3",
        ),
        ask("gate gate --confirm 3"),  # nothing to confirm
        ask("gate gate --baseline main --against gate"),
    ],
    "a block lost to a failed run": [
        both(Arm(states={3: "interrupted"})),
        ask("gate gate --only zero3"),
        both(Arm(states={3: "crashed"}), sweep="lost"),
        ask("gate lost", "zero3 failed (block 3: head: crashed: as the test wants)"),
    ],
    "a repeat that failed, of a sweep without arms": [
        recorded("good"),
        recorded("ended", Arm(states={3: "interrupted"})),
        recorded("lost", Arm(states={3: "hang"})),
        ask("baseline save main good"),
        ask("gate ended --baseline main"),
        ask("gate lost --baseline main", "zero3 failed (repeat 3: hang: as the", code=3),
        ask("gate lost --against good", code=3),
        # A good run of the same code does not make up for one that failed after it.
        recorded("good", Arm(states={1: "crashed"}), blocks=2),
        ask("gate good --baseline main", "zero3 failed (repeat 1: crashed: as the test wants)"),
    ],
    "confirmation blocks that failed": [
        SLOWER,
        ONE_CELL,
        ask(f"run {ARMS} --interleave --repeat 6"),
        times(None),
        ends(base="crashed"),
        ask(f"gate {ARMS} --confirm 2", "the regression stays as it was"),
    ],
}

BASELINE_NOISE: Scenarios = {
    "enough steady blocks": [
        EQUAL,
        file(TWO_CELLS),
        ask("baseline noise sweep.yaml --repeat 6", "noise floor"),
        ask("baseline noise", "calibrated 20", "Example CPU, 2 cores"),
    ],
    "nothing is calibrated yet": [
        does(lambda world: world.store),
        ask("baseline noise", "no noise calibration"),
    ],
    "fewer blocks than an interval needs": [
        file(TWO_CELLS),
        ask("baseline noise sweep.yaml --repeat 5", "at least 6 blocks"),
    ],
    "too few blocks gave a steady time": [
        ends(ddp="crashed", mfsdp="crashed"),
        file(TWO_CELLS),
        ask(
            "baseline noise sweep.yaml --repeat 6",
            "crashed: as the test wants -- mfsdp-bench status",
        ),
        holds(lambda world: world.store.noise.names() == []),
    ],
}

BASELINE: Scenarios = BASELINE_NOISE | {
    "saved, listed, promoted": [
        recorded(),
        recorded("faster", Arm(slower=0.9)),
        ask("baseline save main gate"),
        ask("baseline save new faster"),
        ask("baseline promote new main"),
        holds(lambda world: '"sweep": "faster"' in world.store.baselines.path("main").read_text()),
        ask("baseline list"),
    ],
    "a name that is taken": [
        recorded(),
        ask("baseline save main gate"),
        ask("baseline save main gate", "baseline promote OTHER main"),
    ],
    "an unknown sweep, arm or baseline": [
        both(Arm()),
        ask("baseline save main gate", "base, head; name one of them", code=2),
        *wrong("baseline save main gaet", "baseline save ../main gate --arm head"),
        ask("baseline promote new main"),
    ],
    "a sweep without a finished run": [
        swept(ddp="crashed", mfsdp="crashed"),
        ask("baseline save main two"),
    ],
    "promoted over one of other hardware or configurations": [
        *(recorded(name, arm, cells=cells, blocks=2) for name, arm, cells in (
            ("here", Arm(), ONE), ("there", Arm(hardware=OTHER_MACHINE), ONE), ("ddp", Arm(), DDP)
        )),
        *(ask(f"baseline save {name} {name}") for name in ("here", "there", "ddp")),
        ask("baseline promote there here", "hardware differs", code=5),
        ask("baseline promote ddp here"),
    ],
}  # fmt: skip
