"""Smaller programs that still fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

from bench.validate.fuzz.program import Cycle, Pass, Program, UnitShape

T = TypeVar("T")
S = TypeVar("S", UnitShape, Cycle)


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """The smallest program that was found within `seconds`; `program` itself fails."""
    deadline = time.monotonic() + seconds
    tried = {program}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """One step smaller each, the largest steps first."""
    yield from (replace(program, cycles=c) for c in _without_one(program.cycles) if c)
    for index, cycle in enumerate(program.cycles):
        for passes in _without_one(cycle.passes):
            yield _with_cycle(program, index, replace(cycle, passes=passes))
    for index in range(len(program.units)):
        if len(program.units) > 1 and not _fails_in(program, index):
            yield _without_unit(program, index)
    yield from (replace(program, options=options) for options in _without_one(program.options))
    yield from _plainer_settings(program)
    for index, unit in enumerate(program.units):
        for simpler in _simpler(unit, UnitShape()):
            units = (*program.units[:index], simpler, *program.units[index + 1 :])
            yield replace(program, units=units)
    yield from _plainer_passes(program)


def _plainer_passes(program: Program) -> Iterator[Program]:
    for index, cycle in enumerate(program.cycles):
        for simpler_cycle in _simpler(cycle, Cycle(cycle.passes)):
            yield _with_cycle(program, index, simpler_cycle)
        for number, pass_ in enumerate(cycle.passes):
            for simpler_pass in _simpler_pass(pass_):
                passes = (*cycle.passes[:number], simpler_pass, *cycle.passes[number + 1 :])
                yield _with_cycle(program, index, replace(cycle, passes=passes))


def _plainer_settings(program: Program) -> Iterator[Program]:
    plain = Program(program.engine, ranks=min(2, program.ranks))
    names = ["mode", "root", "dtype", "ranks"] + ["strategy"] * (
        program.engine in ("mfsdp", "fsdp2")
    )
    for name in names:
        wanted = getattr(plain, name)
        if getattr(program, name) != wanted:
            yield replace(program, **{name: wanted})


def _without_one(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    for index in range(len(items)):
        yield (*items[:index], *items[index + 1 :])


def _with_cycle(program: Program, index: int, cycle: Cycle) -> Program:
    return replace(program, cycles=(*program.cycles[:index], cycle, *program.cycles[index + 1 :]))


def _fails_in(program: Program, unit: int) -> bool:
    passes = [pass_ for cycle in program.cycles for pass_ in cycle.passes]
    return any(pass_.kind == "failing" and pass_.fails[1] == unit for pass_ in passes)


def _without_unit(program: Program, unit: int) -> Program:
    def walked(each: Pass) -> Pass:
        paths = tuple(path[:unit] + path[unit + 1 :] for path in each.paths)
        phase, where = each.fails
        return replace(each, paths=paths, fails=(phase, where - (where > unit)))

    cycles = tuple(replace(c, passes=tuple(map(walked, c.passes))) for c in program.cycles)
    units = (*program.units[:unit], *program.units[unit + 1 :])
    return replace(program, units=units, cycles=cycles)


def _simpler(item: S, plain: S) -> Iterator[S]:
    """One field each as in the plainest one."""
    for field in fields(item):
        wanted = getattr(plain, field.name)
        if getattr(item, field.name) != wanted:
            yield replace(item, **{field.name: wanted})


def _simpler_pass(longer: Pass) -> Iterator[Pass]:
    if len(longer.paths) > 1:
        yield from (replace(longer, paths=(path,)) for path in longer.paths)
    if longer.kind in ("double", "pair", "failing"):
        yield replace(longer, kind="micro", fails=("", 0))
    for number, path in enumerate(longer.paths):
        for index, letter in enumerate(path):
            if letter != "r" and not (longer.kind == "failing" and longer.fails[1] == index):
                changed = path[:index] + "r" + path[index + 1 :]
                yield replace(
                    longer, paths=(*longer.paths[:number], changed, *longer.paths[number + 1 :])
                )
