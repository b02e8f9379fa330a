"""A memory profile measures what the ledger cannot know, and recompute shows up in it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.spec import EngineSpec, LaunchSpec, MeasureSpec, ModelSpec, RunSpec, TrainSpec

pytestmark = pytest.mark.processes
STEPS = 5


def run(recompute: str):
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug", recompute=recompute),
            engine=EngineSpec(name="single"),
            train=TrainSpec(steps=STEPS, global_batch=4, micro_batch=4, seq_len=64),
            launch=LaunchSpec(ranks=1),
            measure=MeasureSpec(profile="memory"),
        )
    )


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory) -> Mapping:
    kinds = ("none", "selective", "full")
    return run_cells(tmp_path_factory.mktemp("profiles"), {kind: run(kind) for kind in kinds})


def activations(cells, recompute: str) -> int:
    return cells[recompute].document("memory.json")["by_category_bytes"]["activations"]


def test_recompute_saves_activations_and_full_saves_most(cells):
    assert activations(cells, "full") < activations(cells, "selective") / 2
    assert activations(cells, "selective") < activations(cells, "none")


def test_full_recompute_keeps_the_input_of_each_layer_and_the_loss(cells):
    tokens, hidden, vocab, layers = 4 * 64, 128, 256, 4
    layer_inputs = layers * tokens * hidden * 4
    logits = tokens * vocab * 4
    assert layer_inputs + logits < activations(cells, "full") < 2 * (layer_inputs + logits)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_allocator_peak_covers_persistent_memory_and_activations(cells, recompute):
    memory = cells[recompute].document("memory.json")
    ledger = memory["by_category_bytes"]
    peak = memory["cpu_allocator_peak_bytes"]
    assert peak > ledger["main_weights"] + ledger["gradients"] + ledger["optimizer_state"]
    assert peak < 2 * sum(ledger.values())


def test_profiling_changes_no_loss_and_covers_all_steps(cells):
    assert cells["full"].losses == pytest.approx(cells["none"].losses, rel=1e-6)
    assert len(cells["none"].losses) == STEPS


def test_what_fit_predicts_is_kept_beside_what_was_measured(cells):
    memory = cells["none"].document("memory.json")
    predicted = memory["predicted"]
    assert predicted["peak_bytes"] == pytest.approx(memory["cpu_allocator_steps_peak_bytes"], 0.001)
    for name in ("main_weights", "gradients", "optimizer_state"):
        assert predicted["by_category_bytes"][name] == memory["by_category_bytes"][name]
