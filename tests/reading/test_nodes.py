"""Reports name nodes and axes; ranks that jump between nodes are refused."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, in_memory, record_run, resolved_run, write_plan

from bench.engines.mfsdp import check_nodes
from bench.errors import UnsupportedError
from bench.spec import EngineSpec
from reports.build import write_report

NODES = ("alpha", "alpha", "beta", "beta", "gamma", "gamma")


def placed(placement: object) -> dict:
    return {"runtime": {"placement": placement}}


@pytest.mark.parametrize("damaged", [None, [], {"nodes": ["a"]}, {"nodes": "a", "local_ranks": 1}])
def test_a_damaged_placement_is_none(damaged: object) -> None:
    assert (
        in_memory({}, resolved=resolved_run(ranks=6), environment=placed(damaged)).placement is None
    )


def test_the_report_names_nodes_and_axes(store, tmp_path) -> None:
    hybrid = EngineSpec(name="mfsdp", strategy="optim_grads_params", outer_size=3)
    run = Recorded(
        resolved_run(ranks=6).model_copy(update={"engine": hybrid}),
        cell="hybrid",
        environment=placed({"nodes": NODES, "local_ranks": [0, 1] * 3}),
    )
    record_run(store, run)
    write_plan(store, [("hybrid", run.resolved)])
    text = write_report(store, ["quickstart"], tmp_path / "report").markdown.read_text()
    assert "inner axis of 2 ranks, within one node; outer axis of 3 ranks, across 3 nodes" in text


def test_ranks_of_a_node_with_others_between_them_are_refused() -> None:
    check_nodes(["a", "a", "b", "b"])
    with pytest.raises(UnsupportedError, match="ranks 0 and 2 are on node a"):
        check_nodes(["a", "b", "a", "b"])
