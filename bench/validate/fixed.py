"""Programs of `mfsdp-bench validate mfsdp`: behaviours that no toy model with a plain loop shows.

Each is a row: name, units, cycles, settings. A unit is a kind, and what of it is frozen or tied; a
cycle, behind the last one's `;`, is passes and settings of `Cycle`. A pass is its kind (`micro:` if
left out), the paths of the ranks, and where it fails: `failing:rcr!recompute1`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bench.validate.program import META, Cycle, Pass, Program, UnitShape

_OF_PROGRAM = {field.name for field in fields(Program)}
_OF_CYCLE: dict[str, Any] = {field.name: field.default for field in fields(Cycle)}


def row(name: str, units: str, cycles: str, **settings: object) -> Program:
    """settings: fields of `Program`, and options of the engine."""
    options = tuple((key, value) for key, value in settings.items() if key not in _OF_PROGRAM)
    given = {key: value for key, value in settings.items() if key in _OF_PROGRAM}
    shapes = tuple(map(_unit, units.split()))
    made = tuple(map(_cycle, cycles.split(";")))
    return Program("mfsdp", options=options, units=shapes, cycles=made, name=name, **given)  # type: ignore[arg-type]


def _unit(text: str) -> UnitShape:
    kind, *marks = text.split("/")
    frozen = next((mark for mark in marks if mark in ("part", "all")), "")
    tie = next((mark for mark in marks if mark in ("root", "unit")), "")
    hidden = next((int(mark) for mark in marks if mark.isdigit()), UnitShape().hidden)
    return UnitShape(kind, hidden, frozen, tie)


def _cycle(text: str) -> Cycle:
    passes, settings = list[Pass](), dict[str, Any]()
    for word in text.split():
        key, _, value = word.partition("=")
        if key in _OF_CYCLE:
            plain = _OF_CYCLE[key]
            settings[key] = value == "yes" if isinstance(plain, bool) else type(plain)(value)
            continue
        head, _, fails = word.partition("!")
        kind, _, paths = head.rpartition(":")
        where = (fails[:-1], int(fails[-1])) if fails else ("", 0)
        passes.append(Pass(kind or "micro", tuple(paths.split("|")), where))
    return Cycle(tuple(passes), **settings)


_TIED = "Block/root Block/root"
_STAYS = "optimizes=no"
_INFINITE = "guarded:r!inf0 r"

# fmt: off
FIXED = (
    row("frozen layer first", "Adapter/part Block Adapter/part", "rrr rrr"),
    row("two buckets per slot", "Block/part Block/part Block/part", "rrr rrr; KCK",
        allocator="fixed_pool"),
    row("tied on the meta device", "Block/root Conv", "rr", root="tied", **{META: True}),
    row("resumed on two axes", "Block/10", "r; r resumes=yes", ranks=4, mode="hfsdp"),
    row("resumed and loaded", "Block Gain", "rr; rr resumes=yes; rr loads=yes", strategy=1),
    row("large gradients under the guard", "Rows", f"r {_STAYS}", dtype="float32",
        loss_scale=1.4e38, check_for_nan_in_grad=True, report_nan_in_param_grad=True),
    row("recomputed in nested graphs", _TIED, "kk kc", strategy=1, root="tied"),
    row("nested graphs, one microbatch", _TIED, "kk", strategy=0, root="tied"),
    row("nested graphs, gradients sharded", _TIED, "kk ck", strategy=2, root="tied"),
    row("recomputed twice", "Block", "K", strategy=1),
    row("no_sync inside sync", "Block", "double:r", strategy=1),
    row("ranks on other paths", "Block Block Block", "rsr|srs rrs|srr; ssr|rrr"),
    row("sums in the order of ranks", "Block", f"r {_STAYS}", ranks=4, strategy=2,
        dtype="float32", exact=True, transport="point_to_point"),
    row("per token and average", "Block", "r r", average_in_collective=True,
        calculate_per_token_loss=True),
    row("decoupled gradients", "Block", f"r r {_STAYS}; {_STAYS}; r {_STAYS}",
        use_decoupled_grad=True),
    row("decoupled gradients, attached twice", "Block",
        f"r r end=each {_STAYS}; r r end=each {_STAYS}", use_decoupled_grad=True),
    row("exceptions", "Block Block Block",
        "rrr failing:rrr!forward1; failing:rcr!recompute1 rrr; failing:rrr!backward1"),
    row("exceptions, gradients whole, in pools", "Block Block Block",
        "rrr failing:rrr!backward0; failing:rrr!forward2 rrr", strategy=1,
        sync_model_each_microbatch=True, allocator="fixed_pool"),
    row("the guard refuses", "Gain Table Block", "guarded:rrr rrr", report_nan_in_param_grad=True),
    row("the guard refuses infinite gradients, check_for_nan_in_grad", "Block/all", _INFINITE,
        strategy=0, root="frozen", check_for_nan_in_grad=True),
    row("the guard refuses infinite gradients, report_nan_in_param_grad", "Block/all", _INFINITE,
        root="frozen", report_nan_in_param_grad=True),
    row("used from the third cycle on", "Block Block", "ps; ps ps", strategy=1),
    row("scaled on two axes", "Block", "r r scale=0.5; r scale=3.0 clip=0.05", ranks=4, strategy=2,
        mode="hfsdp"),
    row("behind the calls of FSDP2", "Gain Table/part Outer",
        "rtp crk clip=0.05; rrr failing:rrr!forward1 rpr; pair:rsr loads=yes", ranks=4,
        mode="hsdp", root="tied", front="fsdp2"),
    row("modules that nobody calls", "Table Block Table/part", "rrr rrr",
        enable_fine_grained_param_gather=True),
)
# fmt: on
