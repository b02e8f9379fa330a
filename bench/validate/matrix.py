"""Which cases there are: a quick set that touches every axis, and the full one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations, product
from operator import attrgetter
from typing import Any

from bench.errors import UsageError
from bench.removed import removed
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
    AnyCase,
    Case,
)
from bench.validate.fixed import FIXED
from bench.validate.toy_models import TOY_MODELS

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
#: What cases cross, quick any two and `full` any three, the usual value first. Weights go out in
#: few cases of their own.
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
    programs = [program for program in FIXED if program.engine == engine]
    return sorted([*on_axes, *programs], key=attrgetter("ranks"))


def select(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """Cases that one of `patterns` names: an id, a part of ids, or a shell pattern; all if none.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    if not patterns:
        return list(cases)
    wanted: set[str] = set()
    ids = [case.id for case in cases]
    for pattern in patterns:
        matching = {pattern} if pattern in ids else {id_ for id_ in ids if _matches(id_, pattern)}
        if not matching:
            example = ids[0] if ids else "no case"
            raise UsageError(
                f"--case {pattern!r} matches none of {len(cases)} cases; ids look like {example} "
                f"(--list shows all; --full has more){removed(pattern)}"
            )
        wanted |= matching
    return [case for case in cases if case.id in wanted]


def _matches(case_id: str, pattern: str) -> bool:
    return pattern in case_id or fnmatchcase(case_id, pattern)


def _quick(engine: str) -> Iterator[Case]:
    base = Case(engine, "no_shard")
    sharded = replace(base, strategy="optim_grads_params")
    yield from _crossed(sharded, 2)
    for strategy in STRATEGIES:
        plain = replace(base, strategy=strategy)
        yield replace(plain, microbatches=3)
        yield replace(plain, policy="bf16", microbatches=2)
        yield replace(plain, model="frozen", microbatches=2)
    for either, model in product(
        (sharded, base), ("cross_tied", "twice", "unused", "sporadic", "sparse", "scalar", "rooted")
    ):
        yield replace(either, model=model, microbatches=2)
    for strategy in ("optim", "optim_grads"):
        yield replace(base, strategy=strategy, model="sporadic", microbatches=2)
    for strategy in ("no_shard", "optim_grads_params"):  # a divisor that no binary number holds
        yield replace(base, strategy=strategy, ranks=3, policy="bf16_wire", microbatches=2)
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
    if engine == "mfsdp":
        front = replace(sharded, front="fsdp2", microbatches=2)
        yield from (replace(front, model=model) for model in ("stack", "tied", "frozen", "rooted"))
        yield from (replace(front, policy=policy) for policy in ("fp32", "bf16", "bf16_wire"))
        yield replace(front, strategy="optim_grads", model="recomputed", microbatches=3)
        yield replace(front, scenario="reloaded", model="twice")
        yield replace(front, ranks=4, outer=2, model="uneven")
        muon = replace(base, optimizer="muon", microbatches=2)
        yield from (replace(muon, strategy=strategy, policy="fp32") for strategy in STRATEGIES)
        yield replace(muon, strategy="optim", policy="bf16", model="cross_tied")
        for outer in ("no_shard", "optim"):
            both = replace(sharded, ranks=4, outer=2, outer_strategy=outer, model="rows")
            yield replace(both, optimizer="muon")
    if engine in ("fsdp2", "mfsdp"):
        yield from _quick_on_the_host(replace(sharded, offload=True, microbatches=2))
        parts = replace(sharded, ranks=4, microbatches=2, reshard=2)
        parts = replace(parts, front="fsdp2" if engine == "mfsdp" else "megatron")
        yield from (replace(parts, model=model) for model in ("stack", "recomputed"))
        yield replace(parts, policy="bf16")
    coded = replace(sharded, policy="bf16", microbatches=2)
    yield replace(coded, recipe="mxfp8", ranks=4, model="rows")
    yield replace(coded, recipe="mxfp8", model="recomputed")
    yield replace(coded, recipe="current", model="tied", allocator="max_pool")
    yield replace(coded, recipe="block", scenario="reloaded", model="frozen")
    yield replace(coded, recipe="mxfp8", ranks=1)


def _quick_on_the_host(usual: Case) -> Iterator[Case]:
    """Offload."""
    bf16 = replace(usual, policy="bf16")
    yield from (replace(bf16, model=model) for model in ("stack", "recomputed"))
    yield replace(usual, ranks=4, outer=2, model="uneven")
    if usual.engine == "mfsdp":
        for strategy in STRATEGIES:
            yield replace(bf16, strategy=strategy, scenario="reloaded", model="frozen")
        yield replace(bf16, ranks=4, outer=2, outer_strategy="optim", allocator="max_pool")
        yield replace(usual, policy="fp32", optimizer="muon")
        yield replace(bf16, front="fsdp2")


def _crossed(usual: Case, strength: int) -> Iterator[Case]:
    """Any two settings, or any three, in each of their values.

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
    for row in covering(FACTORS | {"strategy": strategies}, is_possible, strength):
        yield _with(usual, row)


def _with(usual: Case, row: Row) -> Case:
    values = dict(row)
    mesh = MESHES[values.pop("mesh", "flat")]
    case: Case = replace(usual, **mesh, **values)
    return case


def _quick_on_two_axes(base: Case) -> Iterator[Case]:
    """Hybrid sharding, and data parallelism besides tensor and expert parallelism."""
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
    # Experts whose data-parallel group is one rank: nothing to reduce, and still something to add.
    yield replace(base, strategy="optim_grads_params", model="experts", microbatches=3)


def _full(engine: str) -> Iterator[Case]:
    """Any three settings; every toy model, policy, scenario and recipe on every kind of mesh."""
    yield from _quick(engine)
    yield from _crossed(Case(engine, "optim_grads_params"), 3)
    wide = {"ranks": 4, "outer": 4, "outer_strategy": "optim"}
    meshes: list[dict[str, Any]] = [{"ranks": 1}, *MESHES.values(), {"ranks": 4}, wide]
    for strategy, mesh in product(STRATEGIES, meshes):
        if strategy == "no_shard" and mesh.get("outer_strategy") == "optim":
            continue  # an outer axis shards the optimizer of a sharded model alone
        usual = replace(Case(engine, strategy, microbatches=2), **mesh)
        for model in TOY_MODELS:
            if model not in PARALLEL or mesh == {"ranks": 4}:
                yield replace(usual, model=model)
        for policy in POLICIES:
            yield from (replace(usual, policy=policy, microbatches=count) for count in (1, 3, 4))
        for scenario in SCENARIOS:
            yield replace(usual, scenario=scenario, policy="fp32")
        for recipe in _RECIPES:
            yield replace(usual, recipe=recipe, policy="bf16")


Row = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool], strength: int
) -> list[Row]:
    """Rows in which every `strength` values that go together meet. Greedy: few, not the fewest.

    The same factors give the same rows. factors: values of each, the usual one first.
    is_possible: whether two values go together, where all others are as usual.
    """
    values = {name: [(name, value) for value in factors[name]] for name in factors}
    together = {
        frozenset(pair)
        for first, other in combinations(factors, 2)
        for pair in product(values[first], values[other])
        if is_possible(dict(pair))
    }
    missing = {
        frozenset(group): group
        for names in combinations(factors, strength)
        for group in product(*(values[name] for name in names))
        if all(frozenset(pair) in together for pair in combinations(group, 2))
    }
    rows: list[Row] = []
    while missing:
        row = [*next(iter(missing.values()))]
        for name in factors:
            if name in dict(row):
                continue
            possible = [v for v in values[name] if all(frozenset((v, o)) in together for o in row)]
            groups = [*combinations(row, strength - 1)]
            # The value with which most groups meet that have not met yet.
            new = [sum(frozenset((v, *group)) in missing for group in groups) for v in possible]
            row.append(possible[new.index(max(new))])
        for group in combinations(row, strength):
            missing.pop(frozenset(group), None)
        rows.append({name: dict(row)[name] for name in factors})
    return rows
