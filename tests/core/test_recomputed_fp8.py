"""Layers of Transformer Engine with recomputed activations run as in the forward pass, by a layer
that saves what Transformer Engine saves and writes down what it ran under.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bench.models.build import run_model
from bench.models.initialisation import materialise
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, ModelSpec, RunSpec, TrainSpec
from mfsdp_core import CapturedStep, fully_shard_model, fully_shard_optimizer
from oracle import transformer_engine

FAKE = (0, 1)
pytestmark = pytest.mark.usefixtures("fake_group")
LAYERS, LINEARS = 2, 7
SEEN: list[tuple[bool, str, str]] = []


class _SavedCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return gradient


class Recording(transformer_engine.Linear):
    """Keeps codes of its input under FP8, and the input without: two recomputations differ."""

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        fp8 = transformer_engine.FP8
        SEEN.append((fp8.enabled, type(fp8.recipe).__name__, fp8.phase))
        return super().forward(_SavedCodes.apply(inp) if fp8.enabled else inp)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transformer_engine, "Linear", Recording)
    SEEN.clear()
    with transformer_engine.installed():
        yield


def model(recipe: str, recompute: str, *, quantised: bool = False, **shape: Any) -> nn.Module:
    linear = {
        "linear": "transformer_engine",
        "linear_recipe": recipe,
        "quantised_weights": quantised,
    }
    spec = RunSpec(
        model=ModelSpec(recompute=recompute, **linear, **(shape or {"layers": LAYERS})),
        engine=EngineSpec(name="mfsdp"),
        dtypes=DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16"),
        train=TrainSpec(steps=1, global_batch=1, micro_batch=1, seq_len=16),
        launch=LaunchSpec(ranks=1),
    )
    cpu = torch.device("cpu")
    made, _ = run_model(resolve_anywhere(spec), cpu)
    for layer in made.modules():
        if isinstance(layer, transformer_engine.Linear):
            layer.reset_parameters()
    materialise(made, cpu)
    return made


def sharded(module: Any, **options: Any) -> tuple[Any, Any]:
    built = fully_shard_model(
        module.to(torch.bfloat16),
        fsdp_unit_modules=list(module.unit_classes),
        zero_dp_strategy=3,
        transport="native",
        **options,
    )
    return built, fully_shard_optimizer(torch.optim.SGD(built.parameters(), lr=0.1))


BY_MODULE = {"enable_fine_grained_param_gather": True}


@pytest.mark.parametrize(
    ("recipe", "recompute", "quantised", "options"),
    [
        ("delayed", "none", True, {}),
        ("current", "selective", True, BY_MODULE),
        ("delayed", "full", False, {}),
        ("current", "full", False, BY_MODULE),
        ("delayed", "full", True, BY_MODULE),
        ("current", "full", True, {}),
    ],
    ids=str,
)
def test_recomputed_layers_run_under_the_recipe_of_their_forward_pass(
    recipe: str, recompute: str, quantised: bool, options: dict[str, Any]
) -> None:
    module, optimizer = sharded(model(recipe, recompute, quantised=quantised), **options)
    tokens = torch.arange(16)[None]
    loss = module(tokens, tokens)
    forward, updates = list(SEEN), transformer_engine.FP8.updates
    SEEN.clear()
    loss.backward()
    optimizer.step()
    name = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling"}[recipe]
    every = LAYERS * LINEARS
    full = recompute == "full"
    assert forward == [(True, name, "forward" if full else "")] * every
    assert [(True, name, "recompute")] * (every if full else 0) == SEEN
    # Scales follow once per forward pass, as without recomputing.
    assert transformer_engine.FP8.updates == updates


def test_blocks_of_a_hybrid_too() -> None:
    module, _ = sharded(model("current", "full", preset="hybrid-tiny", pattern="M*/*-"))
    tokens = torch.arange(16)[None]
    module(tokens, tokens).backward()
    forward = [one for one in SEEN if one[2] != "recompute"]
    again = [one for one in SEEN if one[2] == "recompute"]
    assert again
    assert {one[:2] for one in SEEN} == {(True, "Float8CurrentScaling")}
    assert len(again) == sum(one[2] == "forward" for one in forward)


def test_a_captured_step_recomputes_so_too() -> None:
    module, optimizer = sharded(
        model("current", "full"), cuda_graph_mode=True, fsdp_double_buffer=True
    )

    def iteration(tokens: torch.Tensor) -> torch.Tensor:
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CapturedStep(module, optimizer, iteration)
    for _ in range(4):
        step(torch.arange(16)[None])
    assert {one for one in SEEN if one[2] == "recompute"} == {
        (True, "Float8CurrentScaling", "recompute")
    }
