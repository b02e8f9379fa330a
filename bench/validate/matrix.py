"""Which cases there are: a quick set that touches every axis, and the full one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from bench.errors import UsageError
from bench.resolve.machine import Machine
from bench.spec import (
    DEFAULT_TRANSPORT,
    POOLS,
    STRATEGIES,
    OuterStrategyName,
    RecipeName,
    StrategyName,
)
from bench.validate.applicability import why_not
from bench.validate.cases import (
    EXPERT_PARALLEL,
    POLICIES,
    SCENARIOS,
    TENSOR_PARALLEL,
    Case,
)
from bench.validate.fuzz.fixed import FIXED, ProgramCase
from bench.validate.pairwise import Row, pairwise
from bench.validate.toy_models import TOY_MODELS

AnyCase = Case | ProgramCase

#: Toy models that were cut over meshes of their own.
PARALLEL = TENSOR_PARALLEL.keys() | EXPERT_PARALLEL.keys()

#: Inner strategies that an outer axis can shard the optimizer of.
_SHARDING: tuple[StrategyName, ...] = STRATEGIES[1:]
_RECIPES: tuple[RecipeName, ...] = ("delayed", "current", "block", "mxfp8")
MESHES: dict[str, dict[str, Any]] = {
    "flat": {},
    "hsdp": {"ranks": 4, "outer": 2},
    "hfsdp": {"ranks": 4, "outer": 2, "outer_strategy": "optim"},
}
#: What quick cases cross pairwise, the usual value first. Weights go out in few cases of their own.
FACTORS: dict[str, Sequence[Any]] = {
    "strategy": STRATEGIES[::-1],
    "mesh": tuple(MESHES),
    "scenario": [name for name in SCENARIOS if name != "exported"],
    "policy": tuple(POLICIES),
    "allocator": ("storage_resize", "temporary", *POOLS),
    "transport": (DEFAULT_TRANSPORT, "native", "point_to_point"),
    "recipe": ("none", *_RECIPES),
    "model": ("stack", "tied", "recomputed", "uneven", "rows"),
    "microbatches": (1, 2, 3),
    "per_token": (False, True),
    "average": (False, True),
    "nan_check": (False, True),
    "overlap": (True, False),
    "gather_group": (False, True),
}
_HYBRIDS: tuple[tuple[StrategyName, OuterStrategyName], ...] = (
    *((strategy, "no_shard") for strategy in STRATEGIES),
    *((strategy, "optim") for strategy in _SHARDING),
)


def cases(engine: str, *, full: bool) -> list[AnyCase]:
    """Cases for `engine`, applicable or not, each once, few ranks first."""
    wanted = _full(engine) if full else _quick(engine)
    on_axes = sorted(dict.fromkeys(wanted), key=lambda case: (case.ranks, case.outer))
    programs = [one for one in FIXED if one.engine == engine]
    return sorted([*on_axes, *programs], key=_ranks)


def _ranks(case: AnyCase) -> int:
    return case.ranks


def select(found: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """Cases that one of `patterns` names: an id, a part of ids, or a shell pattern; all if none.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    if not patterns:
        return list(found)
    wanted: set[str] = set()
    ids = [case.id for case in found]
    for pattern in patterns:
        matching = {pattern} if pattern in ids else {one for one in ids if _matches(one, pattern)}
        if not matching:
            example = ids[0] if ids else "no case"
            raise UsageError(
                f"--case {pattern!r} matches none of {len(found)} cases; ids look like {example} "
                "(--list shows all; --full has more)"
            )
        wanted |= matching
    return [case for case in found if case.id in wanted]


def _matches(case_id: str, pattern: str) -> bool:
    return pattern in case_id or fnmatchcase(case_id, pattern)


def _quick(engine: str) -> Iterator[Case]:
    base = Case(engine, "no_shard")
    sharded = replace(base, strategy="optim_grads_params")
    yield from _crossed(sharded)
    for strategy in STRATEGIES:
        plain = replace(base, strategy=strategy)
        yield replace(plain, microbatches=3)
        yield replace(plain, policy="bf16", microbatches=2)
        yield replace(plain, model="frozen", microbatches=2)
        yield _ordered(replace(plain, policy="bf16", microbatches=2))
    for either, model in product(
        (sharded, base), ("cross_tied", "twice", "unused", "sporadic", "sparse", "scalar", "rooted")
    ):
        yield replace(either, model=model, microbatches=2)
    for strategy in ("optim", "optim_grads"):
        yield replace(base, strategy=strategy, model="sporadic", microbatches=2)
    for strategy in ("optim", "optim_grads_params"):
        yield replace(base, strategy=strategy, scenario="reloaded", model="frozen", policy="bf16")
    yield replace(base, ranks=1, microbatches=3)
    yield replace(sharded, ranks=1, microbatches=3)
    yield replace(base, strategy="optim", model="scalar", scenario="exported", policy="bf16")
    yield replace(sharded, model="tied", scenario="exported", policy="bf16")
    yield replace(base, transport="point_to_point", ranks=4, microbatches=2)
    for allocator in POOLS:
        yield replace(sharded, model="cross_tied", microbatches=2, allocator=allocator)
    yield from _quick_on_two_axes(base)
    if engine == "fsdp2":
        parts = replace(sharded, ranks=4, microbatches=2, reshard=2)
        yield from (replace(parts, model=model) for model in ("stack", "recomputed"))
        yield replace(parts, policy="bf16", scenario="ahead")
    coded = replace(sharded, policy="bf16", microbatches=2)
    yield replace(coded, recipe="mxfp8", ranks=4, model="rows")
    yield replace(coded, recipe="mxfp8", model="recomputed")
    yield replace(coded, recipe="current", model="tied", allocator="max_pool")
    yield replace(coded, recipe="block", scenario="reloaded", model="frozen")
    yield replace(coded, recipe="mxfp8", ranks=1)


def _crossed(usual: Case) -> Iterator[Case]:
    """Any two settings in each of their values.

    Of an engine that nothing is known of here they are tried one by one, at both ends of the
    strategies: hardly a case with many settings would run.
    """
    machine = Machine.detect()

    def is_possible(row: Row) -> bool:
        case = _with(usual, row)
        # Slots, and sums in the dtype of the wire, were planned for one wire dtype.
        planned = case.allocator in POOLS or case.transport == "native"
        refuses = case.scenario == "redirected" and planned
        return not refuses and why_not(case, case.ranks, "cpu", machine) is None

    strategies = [name for name in reversed(STRATEGIES) if is_possible({"strategy": name})]
    if ":" in usual.engine or not strategies:
        for strategy, name in product(("optim_grads_params", "no_shard"), FACTORS):
            yield from (_with(usual, {"strategy": strategy, name: v}) for v in FACTORS[name])
        return
    usual = replace(usual, strategy=strategies[0])
    for row in pairwise(FACTORS | {"strategy": strategies}, is_possible):
        yield _with(usual, row)


def _with(usual: Case, row: Row) -> Case:
    values = dict(row)
    mesh = MESHES[values.pop("mesh", "flat")]
    case: Case = replace(usual, **mesh, **values)
    return case


def _ordered(case: Case) -> Case:
    """With slots that are used again, and gathers that reductions do not wait for."""
    case = replace(case, scenario="ordered")
    if not case.sharded:
        return case
    return replace(case, allocator="fixed_pool", gather_group=True)


def _quick_on_two_axes(base: Case) -> Iterator[Case]:
    """Hybrid sharding, and data parallelism beside tensor and expert parallelism."""
    for inner, outer in _HYBRIDS:
        hybrid = replace(base, strategy=inner, ranks=4, outer=2, outer_strategy=outer)
        if inner != "optim_grads":
            yield replace(hybrid, microbatches=3)
    yield replace(base, strategy="optim_grads_params", ranks=4, outer=4, outer_strategy="optim")
    hsdp = replace(base, strategy="optim_grads_params", ranks=4, outer=2)
    yield replace(hsdp, outer_strategy="optim", scenario="exported", model="rows")
    yield replace(hsdp, outer_strategy="optim", model="rooted", gather_group=True)
    for strategy in ("no_shard", "optim_grads_params"):
        for model in ("rowwise", "experts"):
            apart = replace(base, strategy=strategy, model=model, ranks=4)
            yield replace(apart, microbatches=2)
            if strategy == "no_shard":
                yield replace(apart, average=True)


def _full(engine: str) -> Iterator[Case]:
    yield from _quick(engine)
    for strategy, model, ranks, count in product(STRATEGIES, TOY_MODELS, (1, 2, 4), (1, 3)):
        if ranks == 1 and model in PARALLEL:
            continue
        yield Case(engine, strategy, model, ranks=ranks, microbatches=count)
    for strategy, policy, ranks, count in product(STRATEGIES, POLICIES, (1, 2, 4), (1, 2, 3, 4)):
        yield Case(engine, strategy, policy=policy, ranks=ranks, microbatches=count)
    for strategy, scenario, ranks in product(STRATEGIES, SCENARIOS, (1, 2, 4)):
        yield Case(engine, strategy, scenario=scenario, ranks=ranks, microbatches=2, policy="fp32")
    for strategy, model, allocator in product(STRATEGIES, TOY_MODELS, POOLS):
        yield Case(engine, strategy, model, microbatches=2, allocator=allocator)
    for strategy, ranks in product(STRATEGIES, (2, 4)):
        case = Case(engine, strategy, ranks=ranks, microbatches=2)
        for policy in POLICIES:
            yield replace(case, policy=policy, average=True)
            yield replace(case, policy=policy, transport="native")
            yield replace(case, policy=policy, transport="point_to_point")
            yield replace(case, policy=policy, overlap=False)
            yield replace(case, policy=policy, gather_group=True)
            for allocator in ("temporary", *POOLS):
                yield replace(case, policy=policy, allocator=allocator)
    yield from _full_hybrids(engine)
    yield from _full_recipes(engine)


def _full_recipes(engine: str) -> Iterator[Case]:
    for strategy, ranks, recipe in product(STRATEGIES, (1, 2, 4), _RECIPES):
        for policy in ("fp32", "bf16"):
            yield Case(engine, strategy, ranks=ranks, microbatches=2, policy=policy, recipe=recipe)
    for (inner, outer), recipe in product(_HYBRIDS, _RECIPES):
        hybrid = Case(engine, inner, ranks=4, outer=2, outer_strategy=outer, policy="bf16")
        yield replace(hybrid, recipe=recipe, microbatches=2)


def _full_hybrids(engine: str) -> Iterator[Case]:
    for (inner, outer), allocator in product(_HYBRIDS, POOLS):
        hybrid = Case(engine, inner, ranks=4, outer=2, outer_strategy=outer)
        yield replace(hybrid, policy="bf16", allocator=allocator)
    for (inner, outer), size in product(_HYBRIDS, (2, 4)):
        hybrid = Case(engine, inner, ranks=4, outer=size, outer_strategy=outer)
        for count in (1, 2, 3, 4):
            yield replace(hybrid, microbatches=count)
        for model in sorted(TOY_MODELS.keys() - PARALLEL):
            yield replace(hybrid, model=model, microbatches=2)
        for policy in POLICIES:
            yield replace(hybrid, policy=policy, microbatches=2)
            yield replace(hybrid, policy=policy, microbatches=2, average=True)
        for scenario in SCENARIOS:
            yield replace(hybrid, scenario=scenario, microbatches=2)
        yield replace(hybrid, gather_group=True)
        yield replace(hybrid, overlap=False)
