"""In which dtype gradients are added up: by version, nodes and operation; a log settles it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from recorded_runs import resolved_run

from bench.cli.planning import sums_text
from bench.spec import EngineSpec, LaunchSpec
from reports.nccl.rows import Verdict
from reports.nccl.sums import gradient_sums


def run(*, ranks=8, nodes=1, comm="bf16", device="cuda", **engine):
    symmetric = {"nccl_ub": True, "double_buffer": True, "allocator": "fixed_pool"}
    settings = {"name": "mfsdp", "strategy": "optim_grads_params", **symmetric, **engine}
    return resolved_run(ranks=ranks, comm=comm).model_copy(
        update={
            "engine": EngineSpec(**settings),
            "launch": LaunchSpec(ranks=ranks, nodes=nodes, device=device),
        }
    )


def row(operation, verdict, *kernels):
    return SimpleNamespace(operation=operation, verdict=verdict, kernels=kernels)


HSDP = {"outer_size": 2, "outer_strategy": "no_shard"}
HFSDP = {"outer_size": 2, "outer_strategy": "optim"}


@pytest.mark.parametrize(
    ("version", "nodes", "engine", "expected"),
    [
        # The facts of the document: NVLink, reduce-scatter over nodes, all-reduce over nodes.
        ("2.26.2", 1, {}, [("reduce-scatter over one node", "as sent")]),
        ("2.27.3", 1, {}, [("reduce-scatter over one node", "unknown")]),
        ("2.27.3", 2, {}, [("reduce-scatter over 2 nodes", "as sent")]),
        ("2.29.3", 2, {}, [("reduce-scatter over 2 nodes", "as sent")]),
        ("2.29.7", 2, {}, [("reduce-scatter over 2 nodes", "unknown")]),
        (
            "2.30.7",
            2,
            HSDP,
            [("reduce-scatter over one node", "unknown"), ("all-reduce over 2 nodes", "as sent")],
        ),
        (
            "2.29.7",
            2,
            HFSDP,
            [
                ("reduce-scatter over one node", "unknown"),
                ("reduce-scatter over 2 nodes", "unknown"),
            ],
        ),
        ("2.27.3", 1, {"strategy": "no_shard"}, [("all-reduce over one node", "unknown")]),
        # Nobody knows the version, or what it is.
        (None, 2, {}, [("reduce-scatter over 2 nodes", "unknown")]),
        ("nightly", 1, {}, [("reduce-scatter over one node", "unknown")]),
        # What does not ask for symmetric kernels does not get them.
        ("2.30.7", 1, {"nccl_ub": False}, [("reduce-scatter over one node", "as sent")]),
        (
            "2.30.7",
            1,
            {"symmetric_registration": False},
            [("reduce-scatter over one node", "as sent")],
        ),
        # The core's own transport adds up in FP32 whatever NCCL is.
        (
            "2.20.3",
            1,
            {"nccl_ub": False, "transport": "point_to_point"},
            [("reduce-scatter over one node", "fp32")],
        ),
    ],
)
def test_version_and_topology_decide_what_is_possible(version, nodes, engine, expected):
    resolved = run(ranks=8 * nodes, nodes=nodes, **engine)
    found = gradient_sums(resolved, version)
    assert [(one.text, one.summed) for one in found] == expected


def test_ranks_of_an_inner_group_are_neighbours_on_as_few_nodes_as_they_need():
    found = gradient_sums(run(ranks=32, nodes=4, **HFSDP), "2.29.7")
    assert [(one.axis, one.nodes) for one in found] == [("inner", 2), ("outer", 2)]


@pytest.mark.parametrize("other", [{"comm": "fp32"}, {"device": "cpu"}])
def test_sums_of_fp32_and_of_gloo_are_no_question(other):
    assert gradient_sums(run(**other), "2.20.3") == []


@pytest.mark.parametrize(
    ("rows", "summed"),
    [
        ([row("ReduceScatter", Verdict.SYMMETRIC, "ReduceScatter_LD")], "fp32"),
        ([row("ReduceScatter", Verdict.REGULAR, "RING SIMPLE")], "as sent"),
        ([row("ReduceScatter", Verdict.REGULAR, "NVLS SIMPLE")], "unknown"),
        ([row("ReduceScatter", v) for v in (Verdict.SYMMETRIC, Verdict.REGULAR)], "unknown"),
        ([row("AllGather", Verdict.SYMMETRIC, "AllGather_ST")], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_log_settles_it_where_it_shows_one_kind_of_kernel(rows, summed):
    (found,) = gradient_sums(run(), "2.27.3", rows)
    assert found.summed == summed


def test_a_log_does_not_make_possible_what_no_version_can():
    (found,) = gradient_sums(run(), "2.26.2", [row("ReduceScatter", Verdict.SYMMETRIC)])
    assert found.summed == "as sent"


def test_a_plan_says_each_reduction_once_with_the_cells_that_have_it():
    cells = [
        SimpleNamespace(id=name, resolved=resolved)
        for name, resolved in (
            ("one", run()),
            ("two", run(**HFSDP)),  # two reductions, of which the same is said
            ("sent in fp32", run(comm="fp32")),
        )
    ]
    text = sums_text(SimpleNamespace(cells=cells))
    assert text.splitlines() == [
        "gradient sums",
        "  reduce-scatter over one node, sent as bf16: in FP32 from NCCL 2.27.3 on, where "
        "symmetric kernels run (one, two)",
    ]
    assert sums_text(SimpleNamespace(cells=cells[2:])) == ""
