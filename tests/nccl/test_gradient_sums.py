"""In which dtype gradients are added up: by version, nodes and operation; a log settles it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from recorded_runs import resolved_run

from bench.cli.plan import sums_text
from bench.spec import EngineSpec, LaunchSpec
from reports.nccl.expectations import gradient_sums
from reports.nccl.verdicts import Verdict


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


PLAIN = {"nccl_ub": False}
DIRECT = {"nccl_ub": False, "transport": "point_to_point"}
ONE, TWO = "reduce-scatter over one node", "reduce-scatter over 2 nodes"


@pytest.mark.parametrize(
    ("version", "nodes", "how", "expected"),
    [
        # The facts of the document: NVLink, reduce-scatter over nodes, all-reduce over nodes.
        ("2.26.2", 1, {}, [(ONE, "as sent")]),
        ("2.27.3", 1, {}, [(ONE, "unknown")]),
        ("2.27.3", 2, {}, [(TWO, "as sent")]),
        ("2.29.3", 2, {}, [(TWO, "as sent")]),
        ("2.29.7", 2, {}, [(TWO, "unknown")]),
        ("2.30.7", 2, HSDP, [(ONE, "unknown"), ("all-reduce over 2 nodes", "as sent")]),
        ("2.29.7", 2, HFSDP, [(ONE, "unknown"), (TWO, "unknown")]),
        # Ranks of an inner group are neighbours on as few nodes as they need.
        ("2.29.7", 4, HFSDP, [(TWO, "unknown"), (TWO, "unknown")]),
        ("2.27.3", 1, {"strategy": "no_shard"}, [("all-reduce over one node", "unknown")]),
        # Nobody knows the version, or what it is.
        (None, 2, {}, [(TWO, "unknown")]),
        ("nightly", 1, {}, [(ONE, "unknown")]),
        # What does not ask for symmetric kernels does not get them.
        ("2.30.7", 1, PLAIN, [(ONE, "as sent")]),
        ("2.30.7", 1, {"symmetric_registration": False}, [(ONE, "as sent")]),
        # The core's own transport adds up in FP32 whatever NCCL is.
        ("2.20.3", 1, DIRECT, [(ONE, "fp32")]),
        # Sums of FP32, and of gloo, are no question.
        ("2.20.3", 1, {"comm": "fp32"}, []),
        ("2.20.3", 1, {"device": "cpu"}, []),
    ],
)
def test_version_and_topology_decide_what_is_possible(version, nodes, how, expected):
    found = gradient_sums(run(ranks=8 * nodes, nodes=nodes, **how), version)
    assert [(one.text, one.summed) for one in found] == expected


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
    (found,) = gradient_sums(run(), "2.26.2", rows)  # what no version can is not made possible
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
