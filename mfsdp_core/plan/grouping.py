"""Who owns a parameter, and which parameters share buffers.

Every parameter has exactly one owner unit (the root is the unit named ""). A tie that crosses two
units belongs to neither: it is hoisted to the nearest unit around both, at last to the root, which
stays materialised for the whole iteration. The boundary of neither of the two would be a safe place
to release it. The parameters of a unit that agree in dtype, in requires_grad and in being an
expert's or not form a group; a group whose padding would pass the budget is split into several
buckets. What the root owns before the first unit and what it owns behind it (embedding, output
head) are groups of their own: a backward pass fills the one first and the other last, and a buffer
for both would be held from end to end.

Where weights are gathered by module, what one module reads is a group of its own, so that those of
the modules behind it are not there yet. Modules that read next to nothing (`SMALL_SHARE` of their
unit's elements, as norms do) share a group: a collective for each would cost more than it saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from mfsdp_core.plan.layout import Layout, Shape, build_layout, split_by_padding
from mfsdp_core.plan.payload import PayloadPlan

#: Name of the unit that owns what no other unit does.
ROOT = ""

_NOTHING = Layout((), 1, 0)

#: Of a unit's elements: a module that reads no more than that has no bucket of its own.
SMALL_SHARE = 0.01


@dataclass(frozen=True)
class ParameterFacts:
    """What grouping needs to know of one physical parameter.

    names: every qualified name under which modules hold it, registration order. unit: the one that
    owns it. shape: of what this rank holds before sharding. dtype: any name; equal names
    share a group. is_expert: sharded over the mesh of experts. primary: the kind of codes that it
    is kept as (`mfsdp_core.precision.transformer_engine`), "" for plain values. readers: numbers of
    the modules whose calls read it; equal ones share a group. Empty where units gather as a whole.
    """

    names: tuple[str, ...]
    unit: str
    shape: Shape
    dtype: str
    requires_grad: bool
    is_expert: bool = False
    primary: str = ""
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class BucketPlan:
    """One flat buffer to be: its members (indices of the given facts) and their layout.

    is_behind: the root's, registered behind the first unit. is_encoded: its weights travel through
    the model's codec rather than as they are. primary: modules compute with codes of that kind.
    """

    name: str
    unit: str
    dtype: str
    requires_grad: bool
    members: tuple[int, ...]
    layout: Layout
    is_expert: bool = False
    is_encoded: bool = False
    primary: str = ""
    is_behind: bool = False


def nearest_common_unit(chains: Sequence[tuple[str, ...]]) -> str:
    """The unit that owns a parameter. chains: per name, the units around it from the root inwards.

    The innermost unit if all names agree on it, else the last one that all chains begin with.
    """
    innermost = {chain[-1] for chain in chains}
    if len(innermost) == 1:
        return innermost.pop()
    common = ROOT
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        common = level[0]
    return common


def enclosing_units(names: Sequence[str]) -> list[int | None]:
    """Per unit, the innermost other unit that it lies in. names: in registration order."""
    indices = {name: index for index, name in enumerate(names)}

    def around(name: str) -> int | None:
        parts = name.split(".")
        paths = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
        return next((indices[path] for path in paths if path in indices), None)

    return [around(name) for name in names]


def plan_buckets(
    parameters: Sequence[ParameterFacts],
    slices: int,
    *,
    expert_slices: int = 1,
    bucketing: bool = True,
    codec: PayloadPlan | None = None,
) -> list[BucketPlan]:
    """Buckets for `parameters` over `slices` ranks, in registration order of their units.

    Those of experts are over `expert_slices` ranks. What `codec` takes has buckets of its own.

    A bucket is named `unit/number`; the root's are `(root)/number`, which no module can be called.
    Without `bucketing` every parameter has a bucket of its own.
    """
    groups: dict[tuple[BucketPlan, tuple[int, ...]], list[int]] = {}
    units_begun = False
    for index, (facts, readers) in enumerate(
        zip(parameters, _readers_apart(parameters), strict=True)
    ):
        units_begun |= facts.unit != ROOT
        kind = BucketPlan(
            name="",
            unit=facts.unit,
            dtype=facts.dtype,
            requires_grad=facts.requires_grad,
            members=(),
            layout=_NOTHING,
            is_expert=facts.is_expert,
            is_encoded=codec is not None
            and not facts.primary
            and codec.takes(facts.names[0], facts.shape),
            primary=facts.primary,
            is_behind=facts.unit == ROOT and units_begun,
        )
        groups.setdefault((kind, readers), []).append(index)
    plans: list[BucketPlan] = []
    numbers: Counter[str] = Counter()
    for (kind, _), indices in groups.items():
        shapes = [parameters[i].shape for i in indices]
        over = expert_slices if kind.is_expert else slices
        each = [[position] for position in range(len(shapes))]
        for part in split_by_padding(shapes, over) if bucketing else each:
            name = f"{kind.unit or '(root)'}/{numbers[kind.unit]}"
            numbers[kind.unit] += 1
            layout = build_layout([shapes[i] for i in part], over)
            members = tuple(indices[i] for i in part)
            plans.append(replace(kind, name=name, members=members, layout=layout))
    return plans


def _readers_apart(parameters: Sequence[ParameterFacts]) -> list[tuple[int, ...]]:
    """Per parameter, the readers that its group is for; empty for what shares one."""
    elements: dict[tuple[str, tuple[int, ...]], int] = {}
    of_unit: dict[str, int] = {}
    keys = [(facts.unit, facts.readers) for facts in parameters]
    for key, facts in zip(keys, parameters, strict=True):
        size = prod(facts.shape)
        elements[key] = elements.get(key, 0) + size
        of_unit[key[0]] = of_unit.get(key[0], 0) + size
    return [
        () if key[0] == ROOT or elements[key] <= SMALL_SHARE * of_unit[key[0]] else key[1]
        for key in keys
    ]
