"""Bugs of order, put in one at a time: work that is late shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.testing.call import FunctionCall
from bench.testing.workers import ForkServer, WorkersError
from late.programs import Case, from_oracle, from_punctual, unordered_steps
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
FRESH = Case("optim_grads_params", options={"allocator": "temporary"})
POOLED = Case("optim_grads_params", options=MESSAGES | {"allocator": "fixed_pool"}, ranks=4)
WHOLE = Case("no_shard", options=MESSAGES, ranks=4)
HYBRID = Case("optim", "optim", "aligned_stack")
GRAPH = {"cuda_graph_mode": True, "fsdp_double_buffer": True}
AHEAD = Case("optim_grads_params", gathers_ahead=True)
CAPTURED = Case("optim_grads", "", "aligned_stack", GRAPH, captured=True, steps=7)


#: By bug, the program whose numbers it changes; one of them is tried daily.
FOUND = {
    "a-reduction-is-not-waited-for": PLAIN,
    "a-bucket-is-given-back-when-its-reduction-starts": POOLED,
    "a-bucket-is-scaled-behind-its-reduction": HYBRID,
    "the-outer-stage-is-not-waited-for": HYBRID,
    "a-gather-along-the-inner-axis-does-not-wait-for-that-along-the-outer-one": HYBRID,
    "what-a-copy-in-wrote-is-not-waited-for": ALONE,
    "gathered-weights-are-given-back-while-a-unit-computes-with-them": PLAIN,
    "a-gather-does-not-wait-for-the-step-before-it": POOLED,
    "fresh-memory-is-gathered-into-before-its-last-use-has-ended": FRESH,
    "received-slices-are-given-back-before-they-are-added-up": POOLED,
    "the-second-half-of-a-direct-all-reduce-is-not-waited-for": WHOLE,
    "a-captured-step-does-not-wait-for-its-inputs": CAPTURED,
    "nobody-waits-for-the-stream-that-is-captured": CAPTURED,
    "a-replay-reads-the-batch-of-its-capture": CAPTURED,
}
REFUSED = "a-capture-waits-for-what-came-before-it"
DAILY = "a-reduction-is-not-waited-for"
BF16 = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
CAST = Case(
    "optim_grads_params",
    "",
    "aligned_stack",
    {"mixed_precision_policy": BF16},
    dtype=torch.bfloat16,
)
#: As `FOUND`, of bugs in the folders of patches.
KNOWN = {
    "R16": POOLED,
    "R17": POOLED,
    "weights-are-computed-with-before-their-gather-was-waited-for": PLAIN,
    "the-cast-of-a-rank-s-own-part-comes-after-its-gather-was-issued": CAST,
    "the-outer-stage-starts-before-the-inner-one-has-landed": HYBRID,
    "an-accumulator-is-read-before-its-reduction-in-place-has-ended": HYBRID,
}


def test_every_bug_in_the_folder_is_tried():
    assert {*FOUND, REFUSED} == {patch.stem for patch in FOLDER.glob("*.patch")}


@pytest.mark.parametrize(
    "case", [POOLED, *(pytest.param(c, marks=NIGHTLY) for c in (PLAIN, WHOLE, HYBRID, CAPTURED))]
)
def test_without_a_bug_numbers_are_the_oracles(ranks: RankPool, case: Case):
    assert all(difference <= 1e-12 for difference in ranks.run(from_oracle, case, 0))


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=() if bug == DAILY else NIGHTLY) for bug in (*FOUND, *KNOWN)]
)
def test_a_bug_of_order_changes_numbers(bug: str, fork_server: ForkServer, tmp_path: Path) -> None:
    case = (FOUND | KNOWN)[bug]
    patch = FOLDER / f"{bug}.patch" if bug in FOUND else BUG_BY_ID[bug]
    core, differences = copy_of_core(tmp_path, patch).parent, []
    difference_of = from_punctual if case is CAST else from_oracle
    with fork_server.workers(WORLD, core=core, prepare=enter_world) as ranks:
        for seed in range(SEEDS):
            call = FunctionCall.of(difference_of, (case, seed))
            found = ranks.run(call_once, call, seconds=60.0)
            differences += [one.value for one in found if one.value is not None]
    assert any(not difference <= 1e-12 for difference in differences), differences


@NIGHTLY
def test_a_capture_refuses_to_wait_for_what_came_before_it(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    core = copy_of_core(tmp_path, FOLDER / f"{REFUSED}.patch").parent
    with (
        fork_server.workers(WORLD, core=core, prepare=enter_world) as ranks,
        pytest.raises(WorkersError, match="dependency created on uncaptured work"),
    ):
        ranks.run(call_once, FunctionCall.of(from_oracle, (CAPTURED, 0)), seconds=60.0)


def test_no_stream_reads_main_weights_while_an_optimizer_step_writes_them(
    ranks: RankPool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """What was gathered ahead is gathered again after the step, so no number tells of the bug."""
    assert not any(ranks.run(unordered_steps, AHEAD, 0))
    bug = BUG_BY_ID["an-optimizer-steps-while-a-gather-ahead-reads-its-weights"]
    core = copy_of_core(tmp_path, bug).parent
    with fork_server.workers(WORLD, core=core, prepare=enter_world) as others:
        found = others.run(call_once, FunctionCall.of(unordered_steps, (AHEAD, 0)), seconds=60.0)
    assert any(one.value for one in found)
