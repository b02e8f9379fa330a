"""Nodes and ranks that a run waits for are named, and nobody is by chance."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from recorded_runs import (
    Recorded,
    in_memory,
    keep_changes,
    record_run,
    resolved_run,
    sample,
    write_plan,
)

from bench.derive.stragglers import spread
from bench.engines.mfsdp import check_nodes
from bench.errors import UnsupportedError
from bench.record import RunRecord, SteadyWindow
from bench.spec import EngineSpec
from reports.build import write_report

STEPS = 40
WINDOW = SteadyWindow(first=1, last=STEPS, stable=True, method="all")
NODES = ("alpha", "alpha", "beta", "beta", "gamma", "gamma")


def placed(nodes=NODES) -> dict:
    return {"runtime": {"placement": {"nodes": nodes, "local_ranks": [0, 1] * (len(nodes) // 2)}}}


def record(late: dict[int, float], *, seed: int = 0) -> RunRecord:
    """A run of six ranks with noise of 1 %; ranks in `late` take longer by that share."""
    noise = random.Random(seed)
    steps = {
        rank: [
            sample(step, 100 * noise.gauss(1 + late.get(rank, 0), 0.01))
            for step in range(1, STEPS + 1)
        ]
        for rank in range(6)
    }
    return in_memory(steps, resolved=resolved_run(ranks=6), environment=placed())


def test_equal_ranks_are_never_named() -> None:
    for seed in range(20):
        assert spread(record({}, seed=seed), WINDOW).stragglers == ()


def test_on_one_node_and_without_a_placement_a_slow_rank_is_named() -> None:
    damaged = (None, [], {"nodes": ["a"]}, {"nodes": "a", "local_ranks": 1})
    known = [placed(("alpha",) * 6), {}, *({"runtime": {"placement": one}} for one in damaged)]
    for environment in known:
        one = replace(record({4: 0.05}), environment=environment)
        assert (one.placement is None) == (environment is not known[0])
        found = spread(one, WINDOW)
        assert ([lag.name for lag in found.stragglers], found.nodes) == (["rank 4"], ())


def test_a_slow_node_is_named_with_how_often_it_was_last() -> None:
    found = spread(record({2: 0.03, 3: 0.03}), WINDOW)
    (lag,) = found.stragglers
    assert (lag.name, lag.ranks, lag.steps) == ("node beta", 2, STEPS)
    assert lag.last > 30
    assert lag.expected == pytest.approx(STEPS / 3)
    assert 2 < lag.lag_milliseconds < 5


def test_a_rank_that_is_last_by_next_to_nothing_is_not_named() -> None:
    exact = record({})
    steps = {
        rank: [replace(one, milliseconds=100.0 + (rank == 5) * 0.1) for one in samples]
        for rank, samples in exact.steps.items()
    }
    assert spread(replace(exact, steps=steps), WINDOW).stragglers == ()


def test_a_run_that_lacks_a_step_or_has_one_rank_has_no_spread() -> None:
    whole = record({})
    assert spread(replace(whole, steps=whole.steps | {3: whole.steps[3][:-1]}), WINDOW) is None
    alone = replace(whole, resolved=resolved_run(ranks=1))
    assert spread(alone, WINDOW) is None


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
    keep_changes(store)
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
    check_nodes(["a", "a", "b", "b"])
    with pytest.raises(UnsupportedError, match="ranks 0 and 2 are on node a"):
        check_nodes(["a", "b", "a", "b"])
