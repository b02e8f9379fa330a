"""Every engine begins with the same bits, and holds little more at set-up than what it keeps.

Of a model on the meta device each rank writes its own part; the reference is the same engine around
a model that has all values already. What the values are: test_initial_values.py.
"""

from __future__ import annotations

import pytest
import torch
from setup_rank import differences_from_whole, live_setup, start_of, unequal_start
from small_runs import BF16, HFSDP, SENT16, SET_UPS, TIED, ZERO3
from small_runs import accumulating_run as run

from bench.models.build import build_model
from bench.spec import ResolvedRun
from bench.worker.fingerprints import UNEQUAL

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
CODED = {"quantised_weights": True}
TE = {"linear": "transformer_engine", "linear_recipe": "current"}


def example(name: str, strategy: str) -> dict:
    return {"name": f"examples.engines.{name}:build", "strategy": strategy}


RUNS = SET_UPS | {
    "ddp": run({"name": "ddp"}, BF16, TIED),
    "megatron": run({"name": "megatron_fsdp"}, BF16),
    "ddp-zero": run(example("ddp_zero", "optim"), BF16),
    "simple-tied": run(example("simple_fsdp", "optim_grads_params"), BF16, TIED),
    **{
        f"deepspeed-{strategy}": run(example("deepspeed", strategy), SENT16)
        for strategy in ("optim", "optim_grads", "optim_grads_params")
    },
}
#: Whose package makes optimizer state by a step at set-up, or flattens all weights at once.
KEEPS_MORE = {"megatron", "deepspeed-optim_grads"}
SLOW = {"hybrid", "fsdp2-hybrid"}
SMALL_BYTES = 2**18
NEEDS = {"deepspeed": "deepspeed"}


def marked(names: list[str]) -> list:
    """Cells, with what they need besides torch."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.needs(p) for e, p in NEEDS.items() if name.startswith(e)],
            id=name,
        )
        for name in names
    ]


@pytest.mark.parametrize("name", marked(list(RUNS)))
def test_weights_and_losses_are_those_of_a_model_built_whole(workers, name):
    assert workers(differences_from_whole, RUNS[name]) == [[], []]


TWO_TP = {"tensor_parallel": 2}
MIXED = {"preset": "hybrid-tiny", "pattern": "ME*E/ME*E"}
#: 80 layers of a Llama of 70 billion parameters, every width and the vocabulary a 64th.
THIN_70B = {
    "preset": "llama3-70b",
    "hidden": 128,
    "ffn_hidden": 448,
    "heads": 8,
    "kv_heads": 1,
    "vocab": 2004,
}
HELD = {
    **{name: RUNS[name] for name in RUNS if name not in KEEPS_MORE | SLOW},
    "te": run(ZERO3, SENT16, {"preset": "debug", "layers": 5} | TE),
    "70b-thin": run(ZERO3, SENT16, THIN_70B),
    "te-codes": run(ZERO3, SENT16, {"preset": "debug", "layers": 5} | TE | CODED),
    "tp": run(ZERO3 | TWO_TP, BF16),
    "fsdp2-tp": run({"name": "fsdp2"} | TWO_TP, BF16),
    "ep": run(ZERO3 | {"expert_parallel": 2}, BF16, MIXED),
}
#: As deep as the real one; the others say the same of fewer layers.
NIGHTLY_CELLS = {"70b-thin"}


@pytest.mark.parametrize("name", marked(list(HELD)))
def test_set_up_holds_one_unit_more_than_what_is_kept(workers, name):
    units = 3 if "codes" in name else 1  # encoding a unit takes FP32 temporaries, as in every step
    for held in workers(live_setup, HELD[name]):
        assert held["peak"] <= held["after"] + units * held["largest"] + SMALL_BYTES


def sums_of(run: ResolvedRun) -> dict[str, int]:
    """The fingerprint of every parameter, in Python's integers of any size."""
    low = 2**64 - 1
    model = build_model(run.shape, recompute="none", seed=run.train.seed, device=CPU)
    found = {}
    for name, parameter in model.named_parameters():
        total = 0
        for index, bits in enumerate(parameter.detach().view(torch.int32).flatten().tolist()):
            word = (index * 0x9E3779B97F4A7C15 + (bits & 0xFFFFFFFF)) & low
            word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & low
            word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & low
            total += word ^ (word >> 31)
        found[name] = f"{total & low:016x}"
    return found


SMALL = {"preset": "debug", "layers": 1}
SMALL_HYBRID = {"preset": "hybrid-tiny", "pattern": "E*"}
STARTS = {
    "mfsdp": run(ZERO3, BF16, SMALL),
    "mfsdp-hfsdp": run(ZERO3 | HFSDP, BF16, SMALL),
    "mfsdp-tp": run(ZERO3 | TWO_TP, BF16, SMALL),
    "mfsdp-te": run(ZERO3, SENT16, SMALL | TE),
    "mfsdp-te-codes": run(ZERO3, SENT16, SMALL | TE | CODED),
    "mfsdp-ep": run(ZERO3 | {"expert_parallel": 2}, BF16, SMALL_HYBRID),
    "fsdp2": run({"name": "fsdp2"}, BF16, SMALL),
    "fsdp2-tp": run({"name": "fsdp2"} | TWO_TP, BF16, SMALL),
    "ddp": run({"name": "ddp"}, BF16, SMALL),
    "megatron": run({"name": "megatron_fsdp"}, BF16, SMALL),
    "ddp-zero": run(example("ddp_zero", "optim"), BF16, SMALL),
    "simple": run(example("simple_fsdp", "optim_grads"), BF16, SMALL),
    **{
        f"deepspeed-{strategy}": run(example("deepspeed", strategy), SENT16, SMALL)
        for strategy in ("optim", "optim_grads", "optim_grads_params")
    },
}


@pytest.fixture(scope="module")
def expected():
    return {model: sums_of(STARTS[model]) for model in ("mfsdp", "mfsdp-ep")}


@pytest.mark.parametrize("name", marked(list(STARTS)))
def test_fingerprints_are_those_of_the_whole_model_under_every_engine(workers, expected, name):
    wanted = expected["mfsdp-ep" if name == "mfsdp-ep" else "mfsdp"]
    assert workers(start_of, STARTS[name]) == [wanted, wanted]


def test_replicas_that_differ_are_unequal(workers):
    first, second = workers(unequal_start, STARTS["ddp"])
    assert first == second
    assert [name for name, one in first.items() if one == UNEQUAL] == ["head.weight"]
