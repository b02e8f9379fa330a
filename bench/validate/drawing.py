"""Programs drawn at random, within what an engine has a counterpart for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.validate.program import META, Cycle, Pass, Program, UnitShape

KINDS = ("Block", "Block", "Conv", "Gain", "Rows", "Adapter", "Table", "Outer")
#: Those whose modules all have a `reset_parameters`.
_RESET_KINDS = ("Block", "Conv", "Rows", "Adapter")
#: Letters that ranks may mix freely in one pass (docs/core-limits.md).
MIXED_LETTERS = "rspdc"
_LETTERS = "rrrrspdtckCK"
_HIDDEN = (1, 3, 4, 7, 10)
_MOST_UNITS = 5
_ATTEMPTS = 50
_REFUSED_ANYWAY = 0.02
#: Ranks of which a half is a group that is neither one rank nor all.
_IN_PARTS = 4


@dataclass(frozen=True)
class Scope:
    """What programs for an engine may hold. options: (name, values other than the default).

    mixed: share of programs in which ranks take different paths. refuses: features that the engine
    refuses in words, which few programs have. parts: whether weights may stay, between the passes,
    in parts of some of the ranks.
    """

    strategies: tuple[int, ...]
    modes: tuple[str, ...]
    passes: tuple[str, ...]
    ends: tuple[str, ...] = ("sync",)
    options: tuple[tuple[str, tuple[object, ...]], ...] = ()
    loads: bool = True
    wires: tuple[str, ...] = ()
    gathers_ahead: bool = False
    resumes: bool = False
    mixed: float = 0.3
    dtypes: tuple[str, ...] = ("float64", "float64", "float32")
    refuses: frozenset[str] = frozenset()
    parts: bool = False


_PASSES = ("micro", "micro", "micro", "double", "pair", "evaluate", "unused", "failing")
SCOPES: dict[str, Scope] = {
    "mfsdp": Scope(
        (0, 1, 2, 3),
        ("flat", "flat", "hsdp", "hfsdp"),
        _PASSES,
        ends=("sync", "sync", "finish", "start"),
        options=(
            ("overlap_param_gather", (False,)),
            ("overlap_grad_reduce", (False,)),
            ("average_in_collective", (True,)),
            ("calculate_per_token_loss", (True,)),
            ("disable_bucketing", (True,)),
            ("enable_fine_grained_param_gather", (True,)),
            ("allocator", ("temporary", "fixed_pool", "max_pool")),
            ("pool_slots", (3, 4)),
            ("transport", ("native", "point_to_point")),
            ("nested_units", ("all",)),
            ("unused_parameters", ("zero",)),
            ("prefetch_order", ("static",)),
            ("prefetch_budget_bytes", (0, 600, 100_000)),
            ("use_decoupled_grad", (True,)),
            ("report_nan_in_param_grad", (True,)),
            ("check_for_nan_in_grad", (True,)),
            ("sync_model_each_microbatch", (True,)),
            (META, (True,)),
        ),
        wires=("float32", "bfloat16"),
        gathers_ahead=True,
        resumes=True,
    ),
    "fsdp2": Scope(
        (2, 3),
        ("flat", "flat", "hsdp"),
        _PASSES,
        options=(("sync_every_pass", (True,)), ("reduce_scatter_unused_params", (True,))),
        mixed=0.1,
        refuses=frozenset({"kind Gain", "tie root", "tie unit"}),
        parts=True,
    ),
    "ddp": Scope(
        (0,),
        ("flat",),
        _PASSES,
        options=(
            ("find_unused_parameters", (True, True, True)),
            ("gradient_as_bucket_view", (True,)),
            ("static_graph", (True,)),
            ("bucket_cap_mb", (0.0001,)),
        ),
    ),
}
_OUTSIDE_PASSES = ("micro", "micro", "evaluate", "failing")
SCOPES |= {
    "examples.engines.ddp_zero:build": Scope((1,), ("flat",), _OUTSIDE_PASSES, mixed=0.0),
    "examples.engines.simple_fsdp:build": Scope((2, 3), ("flat",), _OUTSIDE_PASSES, mixed=0.0),
    # It loads checkpoints of its own alone.
    "examples.engines.deepspeed:build": Scope(
        (1, 2, 3), ("flat",), _OUTSIDE_PASSES, loads=False, mixed=0.0, dtypes=("float32",)
    ),
}
#: Of `mfsdp` every eighth program goes through FSDP2's interface.
FRONT = Scope(
    (2, 3),
    ("flat", "flat", "hsdp"),
    _PASSES,
    options=(("sync_every_pass", (True,)),),
    refuses=frozenset({"tie root", "tie unit"}),
    parts=True,
)
_FRONT_EVERY = 8
#: An engine given by its import path is driven through the methods that all engines have.
OUTSIDE = Scope((0, 2, 3), ("flat",), _OUTSIDE_PASSES, mixed=0.0)


def draw(engine: str, seed: int, number: int) -> Program:
    """Program `number` of `seed`: the same for ever, whatever was drawn before."""
    through_front = engine == "mfsdp" and number % _FRONT_EVERY == _FRONT_EVERY - 1
    scope = FRONT if through_front else SCOPES.get(engine, OUTSIDE)
    for attempt in range(_ATTEMPTS):
        random = Random(f"{seed}:{number}:{attempt}")
        program = _drawn(engine, scope, random)
        if not program.features() & scope.refuses or random.random() < _REFUSED_ANYWAY:
            break
    return (
        replace(program, options=(*program.options, ("front", "fsdp2")))
        if through_front
        else program
    )


def _drawn(engine: str, scope: Scope, random: Random) -> Program:
    ranks = random.choice((2, 2, 2, 3, 4, 1))
    strategy = random.choice(scope.strategies)
    mode = random.choice(scope.modes) if ranks % 2 == 0 else "flat"
    if strategy == 0 and mode == "hfsdp":
        mode = "hsdp"
    options = _options(random, scope, strategy)
    kinds = _RESET_KINDS if META in dict(options) else KINDS
    units = tuple(_unit(random, kinds) for _ in range(random.randint(1, _MOST_UNITS)))
    mixed = ranks > 1 and random.random() < scope.mixed and _may_mix(dict(options), units)
    cycles = tuple(
        _cycle(random, scope, len(units), mixed=mixed, options=dict(options))
        for _ in range(random.randint(1, 3))
    )
    program = Program(
        engine,
        ranks,
        strategy,
        mode,
        options,
        random.choice(scope.dtypes),
        random.choice(("", "", "tied", "frozen")),
        units,
        cycles,
    )
    # Drawn last, so that the rest is what it was before this could be drawn.
    is_full = (ranks, strategy, mode) == (_IN_PARTS, 3, "flat")
    if scope.parts and is_full and random.random() < 1 / 2:
        return replace(program, options=(*options, ("reshard_after_forward", _IN_PARTS // 2)))
    return program


def _unit(random: Random, kinds: Sequence[str]) -> UnitShape:
    return UnitShape(
        random.choice(kinds),
        random.choice(_HIDDEN),
        random.choice(("", "", "", "part", "all")),
        random.choice(("", "", "", "root", "unit")),
    )


def _options(random: Random, scope: Scope, strategy: int) -> tuple[tuple[str, object], ...]:
    drawn: dict[str, object] = {
        name: random.choice(values) for name, values in scope.options if random.random() < 1 / 6
    }
    pooled = str(drawn.get("allocator", "")).endswith("pool")
    refused: tuple[tuple[str, bool], ...] = (
        ("pool_slots", not pooled),
        (META, strategy == 0),
        ("overlap_grad_reduce", strategy > 1),
        ("prefetch_budget_bytes", "enable_fine_grained_param_gather" in drawn),
    )
    for name, is_refused in refused:
        if is_refused:
            drawn.pop(name, None)
    return tuple(drawn.items())


def _may_mix(options: dict[str, object], units: tuple[UnitShape, ...]) -> bool:
    """Whether ranks may take different paths, by the rules of docs/core-limits.md."""
    frozen = any(unit.frozen == "all" for unit in units)
    return not frozen and not options.keys() & {"transport", "allocator"}


def _cycle(
    random: Random, scope: Scope, units: int, *, mixed: bool, options: dict[str, object]
) -> Cycle:
    def maybe(chance: float, allowed: bool = True) -> bool:
        return allowed and random.random() < chance

    kinds = [k for k in scope.passes if not mixed or k in ("micro", "evaluate", "unused")]
    passes = tuple(_pass(random, random.choice(kinds), units, mixed=mixed) for _ in range(3))
    passes = passes[: random.randint(0 if maybe(0.1) else 1, 3)]
    fixed_wire = str(options.get("allocator", "")).endswith("pool")
    return Cycle(
        passes,
        random.choice(scope.ends) if "sync_model_each_microbatch" not in options else "sync",
        maybe(0.8, "use_decoupled_grad" not in options) and not _builds_only(passes),
        random.choice((0.0, 0.0, 0.05, 1e3)),
        random.choice(scope.wires) if maybe(0.15, bool(scope.wires) and not fixed_wire) else "",
        maybe(0.15, scope.gathers_ahead),
        maybe(0.1, scope.loads),
        maybe(0.1, scope.resumes),
    )


def _builds_only(passes: Sequence[Pass]) -> bool:
    """Whether graphs are built and none is used: the core refuses a step after that."""
    kinds = {pass_.kind for pass_ in passes}
    return "unused" in kinds and kinds <= {"unused", "evaluate"}


def _pass(random: Random, kind: str, units: int, *, mixed: bool) -> Pass:
    def path(letters: str) -> str:
        return "".join(random.choice(letters) for _ in range(units))

    if kind != "failing":
        return Pass(
            kind, (path(MIXED_LETTERS), path(MIXED_LETTERS)) if mixed else (path(_LETTERS),)
        )
    phase, unit = random.choice(("forward", "recompute", "backward")), random.randrange(units)
    letters = list(path("rc"))
    letters[unit] = "c" if phase == "recompute" else letters[unit]
    return Pass(kind, ("".join(letters),), (phase, unit))
