"""Bugs of order, put in one at a time: work that is late shows them, or the recorded order does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.testing.call import FunctionCall
from bench.testing.workers import ForkServer
from late.programs import Case, from_oracle, from_punctual, seen, unordered_steps
from mfsdp_core import MixedPrecisionPolicy
from oracle.ranks import WORLD, RankPool, call_once, enter_world
from tools.bug_in_a_copy import BUG_BY_ID, copy_of_core

pytestmark = pytest.mark.processes
NIGHTLY = pytest.mark.nightly

FOLDER = Path(__file__).parent / "late" / "bugs"
SEEDS = 3
MESSAGES = {"transport": "point_to_point"}
PLAIN = Case("optim_grads_params", toy="unequal_units")
ALONE = Case("optim_grads_params", toy="unequal_units", ranks=1)
POOLED = Case("optim_grads_params", options=MESSAGES | {"allocator": "fixed_pool"}, ranks=4)
WHOLE = Case("no_shard", options=MESSAGES, ranks=4)
HYBRID = Case("optim", "optim", "aligned_stack")
GRAPH = {"cuda_graph_mode": True, "fsdp_double_buffer": True}
AHEAD = Case("optim_grads_params", gathers_ahead=True)
CAPTURED = Case("optim_grads", "", "aligned_stack", GRAPH, captured=True, steps=7)


@dataclass(frozen=True)
class Found:
    """The program that shows a bug by its numbers, and whether the recorded order tells as well."""

    case: Case
    by_order: bool = True
    daily: bool = False


FOUND = {
    "a-reduction-is-not-waited-for": Found(PLAIN, daily=True),
    "a-bucket-is-given-back-when-its-reduction-starts": Found(POOLED),
    "a-bucket-is-scaled-behind-its-reduction": Found(HYBRID),
    "the-outer-stage-is-not-waited-for": Found(HYBRID),
    "a-gather-along-the-inner-axis-does-not-wait-for-that-along-the-outer-one": Found(HYBRID),
    "what-a-copy-in-wrote-is-not-waited-for": Found(ALONE),
    "gathered-weights-are-given-back-while-a-unit-computes-with-them": Found(PLAIN),
    "a-gather-does-not-wait-for-the-step-before-it": Found(PLAIN),
    "received-slices-are-given-back-before-they-are-added-up": Found(POOLED),
    "only-the-first-message-of-an-exchange-is-waited-for": Found(POOLED, by_order=False),
    "the-second-half-of-a-direct-all-reduce-is-not-waited-for": Found(WHOLE),
    "a-captured-step-does-not-wait-for-its-inputs": Found(CAPTURED, by_order=False),
    "nobody-waits-for-the-stream-that-is-captured": Found(CAPTURED, by_order=False),
    "a-replay-reads-the-batch-of-its-capture": Found(CAPTURED, by_order=False),
}


def test_every_bug_in_the_folder_is_tried():
    assert set(FOUND) == {patch.stem for patch in FOLDER.glob("*.patch")}


@pytest.mark.parametrize(
    "case", [POOLED, *(pytest.param(c, marks=NIGHTLY) for c in (PLAIN, WHOLE, HYBRID, CAPTURED))]
)
def test_without_a_bug_numbers_are_the_oracles_and_nothing_races(ranks: RankPool, case: Case):
    for difference, races in ranks.run(seen, case, 0):
        assert difference <= 1e-12
        assert races == []


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=() if FOUND[bug].daily else NIGHTLY) for bug in FOUND],
)
def test_a_bug_changes_numbers_and_most_are_seen_in_the_order(
    bug: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    core = copy_of_core(tmp_path, FOLDER / f"{bug}.patch").parent
    found = FOUND[bug]
    differences, raced = [], False
    with fork_server.workers(WORLD, core=core, prepare=enter_world) as ranks:
        for seed in range(SEEDS):
            call = FunctionCall.of(seen, (found.case, seed))
            answers = [one.value for one in ranks.run(call_once, call, seconds=60.0) if one.value]
            differences.append(max(difference for difference, _ in answers))
            raced |= any(races for _, races in answers)
    assert any(not difference <= 1e-12 for difference in differences), differences
    assert raced is found.by_order


def test_no_stream_reads_main_weights_while_an_optimizer_step_writes_them(
    ranks: RankPool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """What was gathered ahead is gathered again after the step, so no number tells of the bug."""
    assert not any(ranks.run(unordered_steps, AHEAD, 0))
    bug = BUG_BY_ID["an-optimizer-steps-while-a-gather-ahead-reads-its-weights"]
    core = copy_of_core(tmp_path, bug.patch).parent
    with fork_server.workers(WORLD, core=core, prepare=enter_world) as others:
        found = others.run(call_once, FunctionCall.of(unordered_steps, (AHEAD, 0)), seconds=60.0)
    assert any(one.value for one in found)


BF16 = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
CAST = Case(
    "optim_grads_params",
    "",
    "aligned_stack",
    {"mixed_precision_policy": BF16},
    dtype=torch.bfloat16,
)
#: Bugs of order from elsewhere, and the program whose numbers they change.
KNOWN = {
    "R16": POOLED,
    "R17": POOLED,
    "weights-are-computed-with-before-their-gather-was-waited-for": PLAIN,
    "the-cast-of-a-rank-s-own-part-comes-after-its-gather-was-issued": CAST,
    "the-outer-stage-starts-before-the-inner-one-has-landed": HYBRID,
    "an-accumulator-is-read-before-its-reduction-in-place-has-ended": HYBRID,
}


@NIGHTLY
@pytest.mark.parametrize("bug", KNOWN)
def test_a_known_bug_of_order_changes_numbers(
    bug: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    core = copy_of_core(tmp_path, BUG_BY_ID[bug].patch).parent
    case, differences = KNOWN[bug], []
    difference_of = from_punctual if case is CAST else from_oracle
    with fork_server.workers(WORLD, core=core, prepare=enter_world) as ranks:
        for seed in range(SEEDS):
            call = FunctionCall.of(difference_of, (case, seed))
            found = ranks.run(call_once, call, seconds=60.0)
            differences.append(max(one.value for one in found if one.value is not None))
    assert any(not difference <= 1e-12 for difference in differences), differences
