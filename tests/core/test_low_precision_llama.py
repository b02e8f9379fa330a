"""The harness's Llama with layers of Transformer Engine, by the stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.data.batches import build_batches
from bench.engines.registry import build_engine
from bench.models.build import run_model
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, ModelSpec, RunSpec, TrainSpec
from oracle import transformer_engine
from oracle.ranks import WORLD, RankPool

pytestmark = pytest.mark.processes

CPU, STEPS = torch.device("cpu"), 3
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")
TE = {"linear": "transformer_engine"}


def trained(model: dict[str, Any], engine: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
    """In a rank: losses, and bytes gathered by dtype."""
    run = resolve_anywhere(
        RunSpec(
            model=ModelSpec(layers=2, **model),
            engine=EngineSpec(**engine),
            dtypes=BF16,
            train=TrainSpec(steps=STEPS, global_batch=WORLD, micro_batch=1, seq_len=16, lr=2e-3),
            launch=LaunchSpec(ranks=WORLD),
        )
    )
    batches = build_batches(run, torch.distributed.get_rank(), CPU)
    with transformer_engine.installed():
        module, _ = run_model(run, CPU)
        built = build_engine(module, run, CPU)
        losses = []
        for step in range(STEPS):
            loss = built.forward_backward(*batches.microbatch(step, 0), 1.0, True)
            built.clip_grad_norm(1.0)
            built.optimizer_step()
            built.zero_grad()
            losses.append(float(loss))
    return losses, dict(built.gathered_bytes() or {})


def share_of_codes(gathered: dict[str, int]) -> float:
    codes = sum(size for name, size in gathered.items() if name in {"uint8", "float8_e4m3fn"})
    return codes / sum(gathered.values())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_transformer_engine_llama_trains_as_on_codes_of_the_same_recipe(
    ranks: RankPool, recipe: str
) -> None:
    layers = TE | {"linear_recipe": recipe, "quantised_weights": True}
    found = ranks.run(trained, layers, {"name": "mfsdp"})
    expected = ranks.run(trained, {}, {"name": "mfsdp", "recipe": recipe})
    plain = ranks.run(trained, {}, {"name": "mfsdp"})
    for (losses, gathered), (by_recipe, _), (by_bf16, _) in zip(
        found, expected, plain, strict=True
    ):
        # The recipe also encodes embedding and head, which layers of Transformer Engine are not.
        assert losses == pytest.approx(by_recipe, rel=2e-3)
        assert losses == pytest.approx(by_bf16, rel=5e-3)
        assert losses != by_bf16
        assert share_of_codes(gathered) > 0.7
