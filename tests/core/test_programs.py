"""Programs of the fuzzer, chosen by hand: paths, nested graphs and parameters that nobody uses.

Each is compared with plain torch after every pass, and its bytes at rest after every cycle. Letters
of a path say what a unit does: `bench.validate.program.LETTERS`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bench.testing.workers import Workers
from bench.validate.outcomes import outcome_of
from bench.validate.program import META, Cycle, Pass, Program, UnitShape

#: Five units. By case, one string per rank; the second microbatch swaps the ranks' paths.
PATHS = {
    "all run": ("rrrrr", "rrrrr"),
    "a branch of the last unit": ("rrrrr", "rrrrp"),
    "a branch of two units": ("rrrrp", "prprr"),
    "one unit": ("rrrrr", "rrsrr"),
    "neighbours": ("rrrrr", "rsssr"),
    "the last units": ("rrrrr", "rrrss"),
    "the first units": ("rrrrr", "ssrrr"),
    "different units": ("srrsr", "rrsrr"),
    "all but one": ("srrrr", "ssssr"),
    "everything": ("rrrrr", "sssss"),
    "the same unit": ("rrsrr", "rrsrr"),
    "a result": ("rrrrr", "rrdrr"),
    "results and units": ("rdrsr", "rrspd"),
}


def micro(*passes: tuple[str, ...]) -> tuple[Pass, ...]:
    """A pass for each tuple of paths."""
    return tuple(Pass("micro", paths) for paths in passes)


def on_other_paths(strategy: int, runs: str, prefetch: bool, *more: tuple[str, bool]) -> Program:
    """runs: letter of a unit that runs. An evaluation between microbatches takes another path."""
    cycles = []
    for paths in PATHS.values():
        if runs == "k" and any("d" in path for path in paths):
            continue  # docs/core-limits.md: the one thing that ranks must not do differently
        first, second = micro(paths, paths[::-1])
        found = (first, Pass("evaluate", paths[::-1]), second)
        cycles.append(
            Cycle(
                tuple(
                    Pass(one.kind, tuple(path.replace("r", runs) for path in one.paths))
                    for one in found
                )
            )
        )
    options = (("overlap_param_gather", prefetch), *more)
    units = (UnitShape(),) * 5
    return Program("mfsdp", 2, strategy, options=options, units=units, cycles=tuple(cycles))


def unused(strategy: int, allocator: str) -> Program:
    """Gradients, norms and weights of what nobody used are left alone, as by plain torch."""
    passes = (
        (("rrr", "rrr"),),
        (("ppp", "ppp"),),
        (("rpp", "prp"),),
        (("ppp", "ppp"), ("ppp", "ppr")),
        (("psp", "psp"), ("rsp", "psp")),
        (("spp", "pps"),),
    )
    cycles = tuple(Cycle(micro(*one), clip=1.0) for one in passes)
    options = (("allocator", allocator),)
    return Program("mfsdp", 2, strategy, options=options, units=(UnitShape(),) * 3, cycles=cycles)


def used_in_turns(strategy: int) -> Program:
    """What is scaled on its way into the accumulator stands beside what is not.

    Once more each, behind a backward pass that has raised.
    """
    failing = Pass("failing", ("rr",), ("backward", 0))
    uses = (("rr",), ("rs", "rr"), ("rs", "sr"), ("rr", "rs"), ("rs", "sr", "rr"))
    cycles = [
        Cycle((*before, *micro(*((path,) for path in paths))))
        for paths, before in product(uses, ((), (failing,)))
    ]
    return Program("mfsdp", 2, strategy, units=(UnitShape(),) * 2, cycles=tuple(cycles))


def nested(strategy: int, mode: str, path: str) -> Program:
    """Nested graphs add to what is reduced over the outer axis as well."""
    tie = "root" if path == "K" else "unit"
    units = (UnitShape(tie=tie),) * len(path)
    return Program("mfsdp", 4, strategy, mode, units=units, cycles=(Cycle(micro((path,))),))


def corners(ranks: int, strategy: int, *options: tuple[str, object], **more: str) -> Program:
    """A switch in all corners at once.

    A shard without elements, uneven rows, frozen weights, nested units, passes that fail, a load.
    """
    units = (UnitShape("Gain"), UnitShape("Outer"), UnitShape(frozen="part"), UnitShape("Table"))
    given = {"nested_units": "all"} | dict(options)
    if META in given:  # of which every module can draw its weights
        units = (UnitShape(), UnitShape("Conv"), UnitShape(frozen="part"), UnitShape(hidden=1))
    path, branches = (("rrrr",),), (("rprr", "rrsr"),)
    if given.get("transport") == "native":  # docs/core-limits.md: one path for all ranks
        branches = (("rprr",), ("rrsr",))
    cycles = (
        Cycle((*micro(*path), Pass("failing", *path, ("forward", 2))), clip=0.05),
        Cycle((Pass("failing", *path, ("backward", 1)), *micro(*path, *branches))),
        Cycle((Pass("evaluate", *path), *micro(*branches, *path)), loads=True, clip=0.05),
    )
    if given.get("use_decoupled_grad"):  # which no optimizer of torch reads
        cycles = tuple(replace(cycle, optimizes=False) for cycle in cycles)
    mode = more.get("mode", "flat")
    return Program(
        "mfsdp", ranks, strategy, mode, options=(*given.items(),), units=units, cycles=cycles
    )


#: Switches that change what passes do, each as its strategy has it.
SWITCHES: tuple[tuple[int, str, object], ...] = (
    *((strategy, "average_in_collective", True) for strategy in (0, 3)),
    *((strategy, "calculate_per_token_loss", True) for strategy in (1, 3)),
    *((strategy, "check_for_nan_in_grad", True) for strategy in (1, 3)),
    *((strategy, "report_nan_in_param_grad", True) for strategy in (0, 2)),
    *((strategy, "disable_bucketing", True) for strategy in (0, 3)),
    *((strategy, "overlap_grad_reduce", False) for strategy in (0, 1)),
    *((strategy, "overlap_param_gather", False) for strategy in (1, 3)),
    *((strategy, "unused_parameters", "zero") for strategy in (1, 3)),
    *((strategy, "transport", "point_to_point") for strategy in (0, 3)),
    *((3, "transport", "native"), (2, "sync_model_each_microbatch", True)),
    *((3, "allocator", name) for name in ("temporary", "fixed_pool", "max_pool")),
    *((3, "fsdp_double_buffer", True), (3, "enable_fine_grained_param_gather", True)),
    *((3, "prefetch_order", "static"), (3, "prefetch_budget_bytes", 400)),
    *((0, "on_double_reduction", "warn"), (3, META, True)),
    *((1, "nested_units", "outermost"), (3, "front", "fsdp2")),
    *((strategy, "use_decoupled_grad", True) for strategy in (1, 3)),
)

BY_MODULE = ("enable_fine_grained_param_gather", True)
DAILY = ((0, "k", False), (2, "k", True), (3, "c", False), (3, "k", False))
ALLOCATORS = ("storage_resize", "temporary", "max_pool")
PROGRAMS: dict[str, Program] = {
    **{f"paths {s}{r}{p}": on_other_paths(s, r, p) for s, r, p in DAILY},
    "paths by module": on_other_paths(3, "r", True, BY_MODULE),
    "recomputed paths by module": on_other_paths(3, "c", False, BY_MODULE),
    **{f"unused {s}": unused(s, "storage_resize") for s in range(4)},
    **{f"unused {allocator}": unused(3, allocator) for allocator in ALLOCATORS[1:]},
    **{f"used in turns {s}": used_in_turns(s) for s in (0, 1)},
    **{f"nested {s} {path}": nested(s, "hsdp", path) for s in range(4) for path in ("K", "kr")},
    **{f"nested hfsdp {path}": nested(3, "hfsdp", path) for path in ("K", "kr")},
    **{f"corners {s} {name} {value}": corners(2, s, (name, value)) for s, name, value in SWITCHES},
    **{
        f"corners {s} {mode}": corners(4, s, mode=mode)
        for s in (1, 3)
        for mode in ("hsdp", "hfsdp")
    },
}
NIGHTLY = {
    f"paths {s}{r}{p}": on_other_paths(s, r, p)
    for s, r, p in product(range(4), "rkc", (True, False))
    if (s, r, p) not in DAILY
}
NIGHTLY |= {
    f"alone {s} {name} {value}": corners(1, s, (name, value)) for s, name, value in SWITCHES
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [*PROGRAMS, *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHTLY)]
)
def test_a_program_ends_as_plain_torch(name: str, worlds: Workers) -> None:
    outcome = outcome_of(worlds, (PROGRAMS | NIGHTLY)[name])
    assert outcome.kind == "equal", outcome.text
