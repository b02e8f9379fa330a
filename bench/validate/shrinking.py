"""Smaller programs that still fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from bench.validate.program import Cycle, Pass, Program

#: Engines of which every strategy has programs.
_ANY_STRATEGY = ("mfsdp", "fsdp2")


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
            yield _with(program, "cycles", index, replace(cycle, passes=passes))
    for index in range(len(program.units)):
        if len(program.units) > 1 and not _fails_in(program, index):
            yield _without_unit(program, index)
    yield from (replace(program, options=options) for options in _without_one(program.options))
    plain = Program(program.engine, ranks=min(2, program.ranks))
    names = ("mode", "root", "dtype", "ranks") + ("strategy",) * (program.engine in _ANY_STRATEGY)
    yield from _plainer(program, plain, names)
    for index, unit in enumerate(program.units):
        for simpler in _plainer(unit, type(unit)()):
            yield _with(program, "units", index, simpler)
    yield from _plainer_cycles(program)


def _plainer_cycles(program: Program) -> Iterator[Program]:
    for index, cycle in enumerate(program.cycles):
        for simpler in _plainer(cycle, Cycle(cycle.passes)):
            yield _with(program, "cycles", index, simpler)
        for number, pass_ in enumerate(cycle.passes):
            for simpler in _plainer_pass(pass_):
                yield _with(program, "cycles", index, _with(cycle, "passes", number, simpler))


def _without_one(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    return (items[:index] + items[index + 1 :] for index in range(len(items)))


def _with(item: Any, name: str, index: int, part: object) -> Any:
    """With another part at `index` of the field `name`."""
    parts = getattr(item, name)
    return replace(item, **{name: (*parts[:index], part, *parts[index + 1 :])})


def _plainer(item: Any, plain: Any, names: tuple[str, ...] = ()) -> Iterator[Any]:
    """One field each, of all or of these, as in the plainest one."""
    for name in names or [field.name for field in fields(item)]:
        if getattr(item, name) != getattr(plain, name):
            yield replace(item, **{name: getattr(plain, name)})


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


def _plainer_pass(longer: Pass) -> Iterator[Pass]:
    if len(longer.paths) > 1:
        yield from (replace(longer, paths=(path,)) for path in longer.paths)
    if longer.kind in ("double", "pair", "failing"):
        yield replace(longer, kind="micro", fails=("", 0))
    for number, path in enumerate(longer.paths):
        for index, letter in enumerate(path):
            if letter != "r" and not (longer.kind == "failing" and longer.fails[1] == index):
                yield _with(longer, "paths", number, path[:index] + "r" + path[index + 1 :])
