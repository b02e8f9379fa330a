"""How a row of outcomes.md is brought about: steps in a world, some of them commands."""

from __future__ import annotations

import itertools
import json
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recorded_runs import CELLS, Arm, record_arms

TWO_CELLS = "name: two\nmatrix: {product: {engine.name: [ddp, mfsdp]}}\n"
ONE = {"zero3": CELLS["zero3"]}
OTHER_MACHINE = {"cpu_name": "Another CPU", "cpu_count": 64}

World = Any  # the fixture `world` of conftest.py
Step = Callable[[World], object]
#: Outcome of a verb -> its steps.
Scenarios = Mapping[str, Sequence[Step]]


class Ask(NamedTuple):
    """A command line; `says` stands in what is printed. code: where more commands follow."""

    line: str
    says: tuple[str, ...] = ()
    code: int = 0

    def __call__(self, world: World) -> int:
        words = shlex.split(self.line)
        if not world.as_json:
            code = world.run(*words)
            told = world.out + world.err
            assert [said for said in self.says if said not in told] == [], told
            return int(code)
        code = world.run(*words, *(() if "--json" in words else ("--json",)))
        assert json.loads(world.out) is not Ellipsis, f"{self.line}: {world.out[:200]!r}"
        return int(code)


def ask(line: str, *says: str, code: int = 0) -> Ask:
    return Ask(line, says, code)


def wrong(*lines: str) -> list[Ask]:
    """Each is wrong usage."""
    return [Ask(line, code=2) for line in lines]


def play(world: World, steps: Sequence[Step]) -> int:
    """Take all steps; the exit code of the last command."""
    commands = [step for step in steps if isinstance(step, Ask)]
    code = None
    for step in steps:
        found = step(world)
        if isinstance(step, Ask) and step is not commands[-1]:
            assert found == step.code, f"{step.line}: {world.err}"
        code = found if isinstance(found, int) else code
    assert code is not None
    return code


def holds(condition: Callable[[World], object]) -> Step:
    """Something that is true then; of what is printed with --json only that it is JSON counts."""

    def check(world: World) -> None:
        assert world.as_json or condition(world), world.out + world.err

    return check


def does(act: Callable[[World], object]) -> Step:
    def step(world: World) -> None:
        act(world)

    return step


def file(text: str, name: str = "sweep.yaml") -> Step:
    return does(lambda world: (world.folder / name).write_text(text))


def swept(text: str = TWO_CELLS, **states: str) -> Step:
    """A sweep has run, whose cells ended in `states`."""
    return does(lambda world: world.sweep(text, **states))


def ends(**states: str) -> Step:
    """How runs of these cells end from here on."""
    return does(lambda world: setattr(world, "states", states))


def edited(**codes: str) -> Step:
    """From here on these arms are this code, and not what is here; `all` with and without arms."""
    return does(lambda world: setattr(world, "edited", codes))


def times(milliseconds: Callable[[str, int], float] | None, noise: float = 0.002) -> Step:
    """From here on the steps of a run take `milliseconds(arm, block)`."""
    rng = random.Random(7)

    def noisy(arm: str, block: int) -> float:
        return milliseconds(arm, block) * rng.gauss(1.0, noise)

    return does(lambda world: setattr(world, "milliseconds", milliseconds and noisy))


def ticking(seconds: float = 5.0) -> Step:
    """From here on the clock of a budget goes on by so much whenever it is read, twice a block."""
    now = itertools.count(0.0, seconds)
    return does(lambda world: world.patch.setattr("sweeps.budget.monotonic", lambda: next(now)))


def recorded(sweep: str = "gate", arm: Arm | None = None, **how: Any) -> Step:
    """A sweep without arms that was run in eight blocks."""
    arms = {None: arm or Arm()}
    return does(lambda world: record_arms(world.store, arms, sweep=sweep, **{"cells": ONE, **how}))


def both(head: Arm, base: Arm | None = None, **how: Any) -> Step:
    """A sweep `gate` whose two arms were run in eight blocks."""
    arms, how = {"base": base or Arm(), "head": head}, {"noise": 0.003, "cells": ONE, **how}
    return does(lambda world: record_arms(world.store, arms, **how))
