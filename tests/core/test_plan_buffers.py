"""The one table of buffers: every byte has one owner, for every strategy, mesh and dtype policy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from mfsdp_core.plan.buffers import (
    CATEGORIES,
    CATEGORY_OF_ROLE,
    POOL_OF_ROLE,
    BucketBuffers,
    plan_buffers,
    transient_rows,
)
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.grouping import ROOT, BucketPlan
from mfsdp_core.plan.layout import build_layout
from mfsdp_core.plan.payload import WEIGHTS, Payload
from mfsdp_core.plan.strategy import INNER, OUTER, Strategy, parse_strategy

STRATEGIES = [
    parse_strategy(inner, outer)
    for inner, outer in product(INNER, OUTER)
    if (inner, outer) != ("no_shard", "optim")
]
DTYPE = st.sampled_from(["float32", "bfloat16"])


@dataclass(frozen=True)
class Case:
    """A bucket on a mesh."""

    plan: BucketPlan
    strategy: Strategy
    inner: int
    outer: int
    has_outer_axis: bool
    dtypes: GroupDtypes[str]
    payloads: tuple[Payload, ...]

    def tables(self) -> list[BucketBuffers]:
        """Of all ranks, outer rank by outer rank."""
        return [
            plan_buffers(
                self.plan,
                self.strategy,
                Coordinate(i, self.inner, o, self.outer, self.has_outer_axis),
                self.dtypes,
                self.payloads,
            )
            for o in range(self.outer)
            for i in range(self.inner)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    strategy = draw(st.sampled_from(STRATEGIES))
    inner, has_outer = (
        draw(st.integers(1, 4)),
        draw(st.booleans()) or strategy.outer_name != "no_shard",
    )
    outer = draw(st.integers(1, 3)) if has_outer else 1
    slices = Coordinate(0, inner, 0, outer, has_outer).sub_shards(strategy)
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4))
    layout = build_layout(shapes, slices)
    unit, trainable = draw(st.sampled_from([ROOT, "layers.0"])), draw(st.booleans())
    compute = draw(DTYPE)
    dtypes = GroupDtypes(compute, draw(DTYPE), draw(DTYPE), draw(DTYPE), draw(DTYPE))
    payloads = draw(
        st.sampled_from(
            [
                (),
                (Payload(WEIGHTS, compute, layout.slice_elements),),
                (Payload("codes", "uint8", layout.slice_elements), Payload("scales", "uint8", 3)),
            ]
        )
    )
    plan = BucketPlan("b/0", unit, compute, trainable, tuple(range(len(shapes))), layout)
    return Case(plan, strategy, inner, outer, has_outer, dtypes, payloads)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_byte_has_one_owner(case: Case) -> None:
    for table in case.tables():
        a_role_has_one_buffer_of_whole_slices_within_the_bucket(case, table)
        main_weights_lie_in_one_lasting_buffer_in_their_dtype(case, table)
        gradients_have_room_where_the_bucket_is_trained_and_only_there(case, table)
        pools_are_asked_for_what_comes_and_goes_and_nothing_else(table)


def a_role_has_one_buffer_of_whole_slices_within_the_bucket(
    case: Case, table: BucketBuffers
) -> None:
    assert len({(row.role, row.payload) for row in table.rows}) == len(table.rows)
    for row in table.rows:
        assert 0 <= row.slices.start < row.slices.stop <= case.plan.layout.slices
        assert 0 <= row.padding_elements <= row.elements
        assert CATEGORY_OF_ROLE[row.role] in CATEGORIES


def main_weights_lie_in_one_lasting_buffer_in_their_dtype(case: Case, table: BucketBuffers) -> None:
    """[Note: one copy]: where no buffer is theirs, another one in that dtype holds them."""
    owned = table.owned
    own = table.find("main_weights")
    holder = own or table.find("compute_shard") or table.find("compute_weights")
    assert holder.lifetime == "model"
    assert holder.dtype == (case.dtypes.main_params if own else case.dtypes.compute)
    assert {*owned} <= {*holder.slices}
    assert case.dtypes.shares_weights if own is None else own.slices == owned


def gradients_have_room_where_the_bucket_is_trained_and_only_there(
    case: Case, table: BucketBuffers
) -> None:
    of_gradients = {"accumulator", "grad_bucket", "outer_bucket", "grad_cast"}
    assert bool({row.role for row in table.rows} & of_gradients) == case.plan.requires_grad
    if not case.plan.requires_grad:
        return
    accumulator = table.find("accumulator")
    assert {*table.owned} <= {*accumulator.slices}
    # What is not accumulated whole needs a whole bucket for one microbatch's gradient.
    whole = accumulator.elements == case.plan.layout.total_elements
    assert whole or table.find("grad_bucket").elements == case.plan.layout.total_elements


def pools_are_asked_for_what_comes_and_goes_and_nothing_else(table: BucketBuffers) -> None:
    requests = transient_rows([table])
    assert {(pool, row) for pool, found in requests.items() for row in found} == {
        (POOL_OF_ROLE[row.role], row)
        for row in table.rows
        if row.role in POOL_OF_ROLE and row.lifetime != "model"
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_ranks_optimize_is_every_element_once_per_replica(case: Case) -> None:
    owned = sorted((table.owned.start, table.owned.stop) for table in case.tables())
    inner, outer = case.strategy.inner.shards_optimizer, case.strategy.outer.shards_optimizer
    replicas = (1 if inner else case.inner) * (1 if outer else case.outer)
    distinct = sorted(set(owned))
    assert [owned.count(extent) for extent in distinct] == [replicas] * len(distinct)
    assert [low for low, _ in distinct] == [0, *(high for _, high in distinct[:-1])]
    assert distinct[-1][1] == case.plan.layout.slices
