"""Nodes and ranks that a run waits for are named, and nobody is by chance."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from recorded_runs import Recorded, record_run, resolved_run, write_plan

from bench.derive.stragglers import spread
from bench.errors import UnsupportedError
from bench.record import RunRecord, SteadyWindow, StepSample
from bench.spec import EngineSpec
from reports.build import write_report

STEPS = 40
WINDOW = SteadyWindow(first=1, last=STEPS, stable=True, method="all")
NODES = ("alpha", "alpha", "beta", "beta", "gamma", "gamma")


def placed(nodes=NODES) -> dict:
    return {"runtime": {"placement": {"nodes": nodes, "local_ranks": [0, 1] * (len(nodes) // 2)}}}


def record(store, late: dict[int, float], *, seed: int = 0, nodes=NODES) -> RunRecord:
    """A run of six ranks with noise of 1 %; ranks in `late` take longer by that share."""
    folder = record_run(store, Recorded(resolved_run(ranks=6), environment=placed(nodes)))
    noise = random.Random(seed)
    steps = {}
    for rank in range(6):
        steps[rank] = [
            StepSample(step, 100 * noise.gauss(1 + late.get(rank, 0), 0.01), 1, 1, 0.1, 8, 0, 1)
            for step in range(1, STEPS + 1)
        ]
    return replace(store.read(folder.run_id), steps=steps)


@pytest.mark.parametrize("seed", range(20))
def test_equal_ranks_are_never_named(store, seed: int) -> None:
    found = spread(record(store, {}, seed=seed), WINDOW)
    assert found is not None
    assert found.stragglers == ()


def test_a_slow_node_is_named_with_how_often_it_was_last(store) -> None:
    found = spread(record(store, {2: 0.03, 3: 0.03}), WINDOW)
    (lag,) = found.stragglers
    assert (lag.name, lag.ranks, lag.steps) == ("node beta", 2, STEPS)
    assert lag.last > 30
    assert lag.expected == pytest.approx(STEPS / 3)
    assert 2 < lag.lag_milliseconds < 5


def test_on_one_node_a_slow_rank_is_named(store) -> None:
    found = spread(record(store, {4: 0.05}, nodes=("alpha",) * 6), WINDOW)
    assert [lag.name for lag in found.stragglers] == ["rank 4"]
    assert found.nodes == ()


def test_a_rank_that_is_last_by_next_to_nothing_is_not_named(store) -> None:
    exact = record(store, {})
    steps = {
        rank: [replace(one, milliseconds=100.0 + (rank == 5) * 0.1) for one in samples]
        for rank, samples in exact.steps.items()
    }
    assert spread(replace(exact, steps=steps), WINDOW).stragglers == ()


def test_a_run_that_lacks_a_step_or_has_one_rank_has_no_spread(store) -> None:
    whole = record(store, {})
    assert spread(replace(whole, steps=whole.steps | {3: whole.steps[3][:-1]}), WINDOW) is None
    alone = replace(whole, resolved=resolved_run(ranks=1))
    assert spread(alone, WINDOW) is None


def test_a_record_without_placement_names_ranks_alone(store) -> None:
    older = replace(record(store, {1: 0.05}), environment={})
    assert older.placement is None
    assert [lag.name for lag in spread(older, WINDOW).stragglers] == ["rank 1"]


@pytest.mark.parametrize("damaged", [None, [], {"nodes": ["a"]}, {"nodes": "a", "local_ranks": 1}])
def test_a_damaged_placement_is_none(store, damaged) -> None:
    found = replace(record(store, {}), environment={"runtime": {"placement": damaged}})
    assert found.placement is None


def test_the_report_names_nodes_axes_and_stragglers(store, tmp_path) -> None:
    hybrid = EngineSpec(name="mfsdp", strategy="optim_grads_params", outer_size=3)
    run = Recorded(
        resolved_run(ranks=6).model_copy(update={"engine": hybrid}),
        cell="hybrid",
        environment=placed(),
        noise=0.0,
    )
    folder = record_run(store, run)
    path = folder.path / "steps.node0.jsonl"
    # The ranks of beta take 5 ms longer in every step.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(map(_five_more_on_beta, lines)))
    write_plan(store, [("hybrid", run.resolved)])
    text = write_report(store, ["quickstart"], tmp_path / "report").markdown.read_text()
    assert "Nodes and stragglers" in text
    assert "node beta was last in" in text
    assert "inner axis of 2 ranks, within one node; outer axis of 3 ranks, across 3 nodes" in text
    assert text.index("| beta |") < text.index("| alpha |")


def _five_more_on_beta(line: str) -> str:
    sample = json.loads(line)
    sample["milliseconds"] += 5.0 * (sample["rank"] in (2, 3))
    return json.dumps(sample) + "\n"


def test_ranks_of_a_node_with_others_between_them_are_refused() -> None:
    from bench.engines.mfsdp import check_nodes

    check_nodes(["a", "a", "b", "b"])
    check_nodes(["a"])
    with pytest.raises(UnsupportedError, match="ranks 0 and 2 are on node a"):
        check_nodes(["a", "b", "a", "b"])
