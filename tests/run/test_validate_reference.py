"""The arithmetic of the checker, without ranks: attribution, rounding, shards, the set of cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from bench.engines.inspection import LocalRows
from bench.errors import UsageError
from bench.resolve.machine import Machine
from bench.testing import rounding
from bench.validate import joining
from bench.validate.applicability import why_not
from bench.validate.attribution import attribute
from bench.validate.cases import Case
from bench.validate.matrix import FACTORS, MESHES, cases, covering, select

GENERATOR = torch.Generator().manual_seed(5)
RAW = [
    [torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64) for _ in range(2)]
    for _ in range(2)
]


LOST = "{}'s gradient of microbatch {} counts 0 times, expected 0.5".format


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ([[2, 2, 2], [2, 2, 2]], ["as if not divided by the ranks"]),
        ([[1 / 2] * 3] * 2, ["as if divided by the ranks twice"]),
        ([[1 / 3] * 3] * 2, ["as if divided by the microbatches"]),
        ([[1, 1, 1], [0, 0, 0]], ["as if rank 1's contribution was lost", LOST("rank 1", 1)]),
        ([[1, 1, 1], [1, 0, 1]], [LOST("rank 1", 2)]),
        ([[0, 1, 1]] * 2, ["as if microbatch 1 was lost", LOST("every rank", 1)]),
        ([[1, 0, 1]] * 2, ["as if microbatch 2 was lost", LOST("every rank", 2)]),
        ([[0, 0, 1]] * 2, ["as if the last microbatch alone was kept", LOST("every rank", 2)]),
        ([[3, 2, 1]] * 2, ["as if the accumulator was reduced after every microbatch"]),
        # Of rank 3 on two outer ranks.
        ([[0], [0], [1], [1]], ["as if reduced over the inner ranks alone"]),
        ([[0], [0], [2], [2]], ["as if averaged over the inner ranks alone"]),
        ([[2], [2], [2], [2]], ["as if divided by the inner ranks alone"]),
        ([[1, 1]] * 2, []),
    ],
)
def test_counts_of_contributions_are_told_as_the_mistake_that_gives_them(
    counts: list[list[float]], says: list[str]
) -> None:
    drawn = [
        [torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64) for _ in row] for row in counts
    ]
    ranks = len(counts)
    found = sum(
        count * gradient / ranks
        for row, gradients in zip(counts, drawn, strict=True)
        for count, gradient in zip(row, gradients, strict=True)
    )
    parts = [[[gradient] for gradient in row] for row in drawn]
    told = attribute([found], parts, rank=ranks - 1, outer=ranks // 2)
    assert told is not None
    assert bool(told.lines) == bool(says)
    assert [words for words in says if words not in "\n".join(told.lines)] == []
    # The right guess is among the first lines.
    assert [
        words for words in says if "as if" in words and words not in "".join(told.lines[:2])
    ] == []
    wrong = [index for index in range(len(counts[0])) if any(row[index] != 1 for row in counts)]
    assert told.microbatch == (wrong[0] if wrong else None)


def test_numbers_that_no_sum_explains_are_not_explained() -> None:
    contributions = [[[gradient] for gradient in row] for row in RAW]
    assert attribute([torch.ones(6, 4)], contributions) is None
    assert attribute([torch.full((6, 4), float("nan"))], contributions) is None


@pytest.mark.parametrize("every", [True, False])
def test_equal_dtypes_leave_the_exact_mean_and_hardly_any_slack(every: bool) -> None:
    model = rounding.Model(torch.float64, torch.float64, 2, 1, every)
    found, slack = rounding.expected(RAW, model)
    torch.testing.assert_close(found, sum(g for row in RAW for g in row) / 2)
    assert float(slack.max()) < 1e-14


@pytest.mark.parametrize("every", [True, False])
def test_the_slack_of_a_half_precision_wire_covers_its_roundings_and_not_a_lost_gradient(
    every: bool,
) -> None:
    raw = [[g.float() for g in row] for row in RAW]
    model = rounding.Model(torch.float32, torch.bfloat16, 2, 1, every)
    found, slack = rounding.expected(raw, model)
    exact = sum(g for row in RAW for g in row) / 2
    assert bool(((found - exact).abs() <= 2 * slack).all())
    assert float((RAW[1][1] / 2).abs().median()) > 5 * float(slack.median())


def test_what_was_reduced_before_a_further_pass_leaves_its_roundings_though_it_cancels() -> None:
    raw = [[g.float(), -g.float()] for g, _ in RAW]
    once = rounding.Model(torch.float32, torch.bfloat16, 2, 1, every=False)
    (_, slack), (_, again) = (rounding.expected(raw, m) for m in (once, replace(once, again=True)))
    assert float(slack.max()) == 0
    alone = rounding.expected([row[:1] for row in raw], once)[1]
    assert torch.equal(again, alone)


def test_pieces_are_put_together_in_the_order_that_they_claim() -> None:
    whole = torch.arange(10.0).view(5, 2)
    shards = [LocalRows(whole[3:], 1, 2), LocalRows(whole[:3], 0, 2)]
    assert torch.equal(joining.joined("w", shards, (5, 2)), whole)
    assert [joining.first_row(shards, rank) for rank in (0, 1)] == [3, 0]


def test_shards_that_leave_a_row_out_are_refused() -> None:
    with pytest.raises(joining.JoiningError, match="do not make up"):
        joining.joined(
            "w", [LocalRows(torch.ones(2, 2), 0, 2), LocalRows(torch.ones(2, 2), 1, 2)], (5, 2)
        )
    with pytest.raises(joining.JoiningError, match="shards"):
        joining.joined("w", [LocalRows(torch.ones(5, 2), 1, 2)] * 2, (5, 2))


@pytest.mark.parametrize("full", [False, True])
def test_every_case_has_an_id_of_its_own(full: bool) -> None:
    ids = [case.id for case in cases("mfsdp", full=full)]
    assert len(ids) == len(set(ids))


def test_cases_are_selected_by_id_by_a_part_or_by_a_pattern() -> None:
    every = cases("mfsdp", full=False)
    exact = "mfsdp/optim/2/stack/fp64/k3"
    assert [case.id for case in select(every, [exact])] == [exact]
    assert {case.model for case in select(every, ["/tied/"])} == {"tied"}
    assert all(case.outer == 2 for case in select(every, ["*2x2h*"]))
    with pytest.raises(UsageError, match="matches none"):
        select(every, ["tide"])


@pytest.mark.parametrize(("strength", "most"), [(2, 9), (3, 18)])
def test_any_settings_of_a_design_meet_in_each_of_their_values(strength: int, most: int) -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1)}

    def is_possible(row: dict[str, object]) -> bool:
        return row.get("a") != 3 or row.get("b") != "y"

    rows = covering(factors, is_possible, strength)
    met = {frozenset(group) for row in rows for group in combinations(row.items(), strength)}
    every = {
        frozenset(group)
        for names in combinations(factors, strength)
        for group in product(*([(name, v) for v in factors[name]] for name in names))
    }
    assert every - met == {group for group in every if {("a", 3), ("b", "y")} <= group}
    assert len(rows) < most
    assert rows == covering(factors, is_possible, strength)


def test_quick_cases_cross_the_outer_axis_with_every_switch() -> None:
    found = [case for case in cases("mfsdp", full=False) if isinstance(case, Case)]
    for mesh in MESHES.values():
        on_it = [c for c in found if all(getattr(c, key) == v for key, v in mesh.items())]
        for name in FACTORS.keys() - {"mesh"}:
            missing = set(FACTORS[name]) - {getattr(case, name) for case in on_it}
            # An outer axis shards the optimizer of a sharded model alone.
            assert missing <= {"no_shard"}, (mesh, name)
    machine = Machine.detect()
    assert not [case.id for case in found if why_not(case, 4, "cpu", machine)]
